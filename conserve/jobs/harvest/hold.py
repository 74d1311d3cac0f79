"""The hold: a time in which no row is sent to an endpoint that is busy or out of reach."""

from collections.abc import Callable

from conserve.errors import EndpointBusy, EndpointError, EndpointUnavailable
from conserve.jobs.harvest.retry import LONGEST_BACKOFF_S

SAID_AFTER_S = 60.0  # without an answer; a limit of requests is over by then


class Hold:
    """A hold doubles from failure to failure and ends with an answer.

    An endpoint that cannot be reached is named once, and so is one that has been busy for long. `warn` gets its
    name, if it is given.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        say: Callable[[str], None],
        *,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._clock, self._say, self._warn = clock, say, warn or say
        self._length_s = 0.0
        self._until = 0.0
        self._said = False
        self._since: float | None = None  # the first hold after an answer

    @property
    def left_s(self) -> float:
        """Seconds until rows may be sent again; 0 or below if they may be now."""
        return self._until - self._clock()

    def begin(self, error: EndpointError, wish_s: float) -> str | None:
        """Hold for `wish_s` or longer; returns the reason in words, None if no new or longer hold begins.

        Failures within a hold are of the same moment as its first, and prolong it only as far as a server asks.
        """
        if not wish_s:
            return None
        self._since = self._clock() if self._since is None else self._since
        lasts = isinstance(error, EndpointUnavailable) or self._clock() - self._since >= SAID_AFTER_S
        if lasts and not self._said:
            self._said = True
            self._warn(f"{error}; harvesting waits")
        wish_s, left_s = min(wish_s, LONGEST_BACKOFF_S), self.left_s
        if left_s > 0:
            asked = isinstance(error, EndpointBusy) and error.retry_after_s is not None
            begins, length_s = asked and wish_s > self._length_s, wish_s if asked else 0.0
        else:
            begins, length_s = True, min(max(wish_s, self._length_s * 2), LONGEST_BACKOFF_S)
        self._length_s = max(self._length_s, length_s)
        self._until = self._clock() + max(left_s, length_s)
        return f"{error}; trying again in {length_s:.0f} s" if begins else None

    def end(self) -> None:
        """End the hold: the endpoint has answered."""
        self._length_s, self._since = 0.0, None
        if self._said:
            self._said = False
            self._say("the endpoint answers again; harvesting goes on")
