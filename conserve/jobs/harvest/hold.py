"""The hold: how long nothing is sent to an endpoint that is busy or out of reach."""

from collections.abc import Callable

from conserve.errors import EndpointError, EndpointUnavailable
from conserve.jobs.harvest.retry import LONGEST_BACKOFF_S


class Hold:
    """Doubles from one failure to the next, ends with an answer; that nothing answers is said once."""

    def __init__(self, clock: Callable[[], float], say: Callable[[str], None]) -> None:
        self._clock, self._say = clock, say
        self._length_s = 0.0
        self._until = 0.0
        self._said = False

    @property
    def left_s(self) -> float:
        """Seconds until something may be sent again; none left if not above 0."""
        return self._until - self._clock()

    def begin(self, error: EndpointError, wish_s: float) -> str | None:
        """Hold off for `wish_s` or longer; returns what is waited for, None if this was held for already."""
        if isinstance(error, EndpointUnavailable) and not self._said:
            self._said = True
            self._say(f"{error}; harvesting waits")
        if not wish_s or self.left_s > 0:
            return None
        self._length_s = min(max(wish_s, self._length_s * 2), LONGEST_BACKOFF_S)
        self._until = self._clock() + self._length_s
        return f"{error}; trying again in {self._length_s:.0f} s"

    def end(self) -> None:
        """The endpoint has answered."""
        self._length_s = 0.0
        if self._said:
            self._said = False
            self._say("the endpoint answers again; harvesting goes on")
