"""Steps of the engine's start, for the display: ours, and others read off vLLM's log."""

from collections.abc import Callable, Mapping

from conserve.engine.vllm.compat.rehearsal import REHEARSING

IMPORTING = "importing vLLM"
CONVERTING = "converting the demo model"
PROCESSES = "starting its processes"
CONVERTED = "the demo model is converted"
LEARNING = "learning the machine's speed"
TOLD = {
    "Starting to load model": "loading the weights",
    "Loading weights took": "preparing the model",
    "for vLLM's torch.compile": "compiling",
    "Warming up model for the compilation": "compiling",
    "Capturing CUDA graph": "capturing CUDA graphs",
}  # phrases of vLLM's log, in the order in which they appear, and the step that follows each
SERVER_TOLD = {
    CONVERTING: CONVERTING,
    CONVERTED: IMPORTING,
    REHEARSING: REHEARSING,
    "Initializing a V1 LLM engine": PROCESSES,
    **TOLD,
    "learning how long iterations take": LEARNING,
}  # of a server's log, which begins before vLLM is imported


class Phases:
    """The current step of a start. While vLLM's processes start, their log tells it."""

    def __init__(self) -> None:
        self._step: str | None = None
        self._log: Callable[[], str] | None = None

    def begin(self, step: str, log: Callable[[], str] | None = None) -> None:
        """Enter a step; `log` reads the text that the processes wrote since."""
        self._step, self._log = step, log

    def end(self) -> None:
        """Note that the start has ended, well or not."""
        self._step = self._log = None

    @property
    def now(self) -> str | None:
        """The current step, in words; None outside a start."""
        return (told(self._log()) if self._log else None) or self._step


def server_step(log: str) -> str:
    """The step that a starting server is at, by its log so far."""
    return told(log, SERVER_TOLD) or IMPORTING


def told(log: str, phrases: Mapping[str, str] = TOLD) -> str | None:
    """The step that follows the last known phrase in the log; None without one."""
    places = {log.rfind(words): meaning for words, meaning in phrases.items()}
    last = max(places)
    return places[last] if last >= 0 else None
