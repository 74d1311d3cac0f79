"""Steps of the engine's start, for the display: ours, and those that vLLM's log tells of."""

from collections.abc import Callable

IMPORTING = "importing vLLM"
CONVERTING = "converting the demo model"
PROCESSES = "starting its processes"
LEARNING = "learning the machine's speed"
TOLD = {
    "Starting to load model": "loading the weights",
    "Loading weights took": "preparing the model",
    "for vLLM's torch.compile": "compiling",
    "Warming up model for the compilation": "compiling",
    "Capturing CUDA graph": "capturing CUDA graphs",
}  # words of vLLM's log, in the order in which they come, and what follows them


class Phases:
    """The step that a start is at; while vLLM's processes start, its log since then says which."""

    def __init__(self) -> None:
        self._step: str | None = None
        self._log: Callable[[], str] | None = None

    def begin(self, step: str, log: Callable[[], str] | None = None) -> None:
        """Enter a step; `log` reads what the processes wrote since."""
        self._step, self._log = step, log

    def end(self) -> None:
        """The engine is ready, or cannot be."""
        self._step = self._log = None

    @property
    def now(self) -> str | None:
        """The step, in words; None outside a start."""
        return (told(self._log()) if self._log else None) or self._step


def told(log: str) -> str | None:
    """Step that follows the log's last telling line; None if no line tells anything."""
    places = {log.rfind(words): meaning for words, meaning in TOLD.items()}
    last = max(places)
    return places[last] if last >= 0 else None
