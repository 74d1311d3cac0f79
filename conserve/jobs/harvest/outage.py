"""Outages of the store or the endpoint, which a harvester that follows the queue waits out."""

from collections import Counter
from collections.abc import Callable
from http import HTTPStatus

from conserve.errors import EndpointUnusable, StoreError
from conserve.jobs.harvest.retry import backoff_s

OUT_OF_REACH = (HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT)


class Outage:
    """Reports the beginning and the end of an outage once each; the wait doubles with each failure.

    `warn` gets the beginnings, if it is given. `counted` counts outages of the `store` and of the `endpoint`.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        counted: Counter[str] | None = None,
        *,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._say, self._warn = say, warn or say
        self._counted = Counter[str]() if counted is None else counted
        self._what: str | None = None
        self._until_answer = False
        self._failures = 0

    def begin(self, error: StoreError | EndpointUnusable, *, until_answer: bool = False) -> float:
        """Note one more failure; returns the seconds to wait, which double up to a minute.

        With `until_answer` the outage lasts until the endpoint has answered a row: it starts, but refuses rows.
        """
        what = "store" if isinstance(error, StoreError) else "endpoint"
        if what != self._what:
            trouble = "refuses requests" if answers(error) else "cannot be reached"
            self._warn(f"the {what} {trouble} ({error}); harvesting waits")
            self._counted[what] += 1
        self._what, self._until_answer = what, until_answer
        self._failures += 1
        return backoff_s(self._failures - 1)

    def end(self) -> None:
        """Report the end of the outage; until `forget`, the next failure still waits longer than the last."""
        if self._until_answer:
            return
        if self._what is not None:
            self._say(f"the {self._what} is back; harvesting goes on")
        self._what = None

    def answered(self) -> None:
        """Note that the endpoint has answered a row, which ends an outage that waits for it."""
        if self._until_answer:
            self._until_answer = False
            self.end()
            self.forget()

    def forget(self) -> None:
        """Count the next failure as a first one, after a proof that store or endpoint works."""
        if not self._until_answer:
            self._failures = 0


def answers(error: StoreError | EndpointUnusable) -> bool:
    """True if the endpoint itself has answered, not a proxy that cannot reach it."""
    return isinstance(error, EndpointUnusable) and error.status not in (None, *OUT_OF_REACH)
