"""Measures how much live requests wait for each other: the share of their iterations beyond the constant part."""

from math import exp

FADES_S = 30.0  # seconds of live iterations after which one counts for a third


class LiveBusy:
    """A share that forgets: old iterations count less and less."""

    def __init__(self) -> None:
        self._added_s = self._live_s = 0.0

    def note(self, added_s: float, live_s: float) -> None:
        """Note `live_s` seconds of an iteration without its rows, `added_s` of them beyond the constant part."""
        faded = exp(-live_s / FADES_S)
        self._added_s = faded * self._added_s + added_s
        self._live_s = faded * self._live_s + live_s

    @property
    def share(self) -> float:
        """From 0 to 1; 0 before the first live request."""
        return min(1.0, self._added_s / self._live_s) if self._live_s > 0 else 0.0
