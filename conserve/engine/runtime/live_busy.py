"""How busy live requests keep the engine: the share of the time that their parts of iterations take."""

from math import exp

FADES_S = 30.0  # seconds after which an iteration counts for a third


class LiveBusy:
    """A share that forgets. Times are monotonic seconds, given by the caller."""

    def __init__(self) -> None:
        self._share = 0.0
        self._since: float | None = None  # the first live request
        self._at = 0.0

    def note(self, live_s: float, *, at: float) -> None:
        """Note an iteration that ended `at` this time, and in which live requests took so many seconds."""
        if self._since is None:
            if live_s <= 0:
                return
            self._since = self._at = at - live_s
        self._share = self._faded(at) + live_s / FADES_S
        self._at = at

    def share(self, *, now: float) -> float:
        """From 0 to 1, of the time since the first live request, the latest most."""
        if self._since is None or now <= self._since:
            return 0.0
        return min(1.0, self._faded(now) / (1 - exp((self._since - now) / FADES_S)))

    def _faded(self, now: float) -> float:
        return self._share * exp(min(0.0, self._at - now) / FADES_S)
