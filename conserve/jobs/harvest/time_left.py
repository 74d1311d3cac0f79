"""Forecast of the time that the rest of a queue takes, from the tokens computed so far. Pure."""

from collections import deque
from dataclasses import dataclass

WINDOW_S = 60.0  # the rate is that of the last minute: machines and prompts change
FEW = 5  # looks with more tokens, before which a rate is that of the first prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueProgress:
    """Rows and tokens that are done, in flight and to do."""

    rows_done: int  # rows that were answered
    rows_in_flight: int
    rows_waiting: int
    tokens_done: int  # of rows that were answered
    tokens_in_flight: int  # computed so far, of rows in flight
    most_in_flight: int | None = None  # tokens of the same rows if no answer ends early; None if unknown

    @property
    def tokens(self) -> int:
        """All tokens computed so far."""
        return self.tokens_done + self.tokens_in_flight


def left_s(progress: QueueProgress, tokens_per_s: float) -> float | None:
    """Forecast the seconds until no row is left; None while neither rows nor tokens allow a forecast.

    Until a row is answered, answers count in full length. That is no upper bound: the rate may fall, as under live
    traffic.
    """
    tokens = tokens_left(progress)
    if tokens is None or tokens_per_s <= 0:
        return None
    return tokens / tokens_per_s


def tokens_left(progress: QueueProgress) -> float | None:
    """Forecast the tokens still to compute; None while that is unknown.

    Short answers end first, so the mean over the answered rows is too small while others are in flight. All tokens
    divided by the number of answered rows allow for that, as if answers ended at a constant rate. Rows in flight
    that are longer by now are of another kind: they are expected to become as long again. No row is expected to
    exceed its limit.
    """
    rest = None if progress.most_in_flight is None else progress.most_in_flight - progress.tokens_in_flight
    limit = (
        progress.most_in_flight / progress.rows_in_flight
        if progress.most_in_flight and progress.rows_in_flight
        else None
    )
    if not progress.rows_done:
        return None if rest is None or limit is None else rest + progress.rows_waiting * limit
    mean = progress.tokens / progress.rows_done
    in_flight = max(progress.rows_in_flight * mean, progress.tokens_in_flight)
    return (in_flight if rest is None else min(in_flight, rest)) + progress.rows_waiting * (
        mean if limit is None else min(mean, limit)
    )


class Rate:
    """Tokens per second over the last minute, or since the first look if that is more recent."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque()  # (seconds, tokens by then)
        self._rises = 0

    @property
    def firm(self) -> bool:
        """True once tokens were computed at several looks: iterations may take long, and the first ones longest."""
        return self._rises >= FEW

    def look(self, now: float, tokens: int) -> float:
        """Note the tokens computed by now; returns the rate, 0 at the first look."""
        while self._looks and tokens < self._looks[-1][1]:
            self._looks.pop()  # rows were withdrawn: their tokens count again when they are computed again
        self._rises += bool(self._looks) and tokens > self._looks[-1][1]
        self._looks.append((now, tokens))
        while len(self._looks) > 2 and now - self._looks[1][0] >= WINDOW_S:
            self._looks.popleft()
        begun, before = self._looks[0]
        elapsed_s = now - begun
        return (tokens - before) / elapsed_s if elapsed_s > 0 else 0.0
