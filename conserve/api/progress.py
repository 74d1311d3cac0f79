"""Progress of a run in words: a line at each new step and every 30 s, or how it stands just now."""

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from conserve.api.shielded import in_thread
from conserve.config import Settings
from conserve.errors import StoreError
from conserve.hosts import server_root, without_login
from conserve.units import count

if TYPE_CHECKING:
    from conserve.jobs.harvest.harvester import Harvester
    from conserve.jobs.harvest.tally import Tally
    from conserve.jobs.harvest.time_left import QueueProgress

LINE_S = 30.0
COUNT_S = 1.0  # at least, between two counts of the rows left


def first_step(settings: Settings) -> str:
    """First step of a run, in its endpoint's words; printed before anything slow is imported."""
    address = settings.endpoint
    if address is None:
        return f"starting {settings.engine_model}: importing vLLM"
    if address.startswith("fake:"):
        return "starting the fake endpoint"
    return f"asking {server_root(without_login(address))} what it serves"


class ProgressNow(NamedTuple):
    """Progress at one moment: the step of the start while there is one, else rows that are done and their pace."""

    step: str | None
    done: int = 0
    total: int = 0
    pace: str = ""


class Progress:
    """Progress of a harvester; `said` is the step that was printed last."""

    def __init__(
        self,
        harvester: "Harvester",
        rows_left: Callable[[], int],
        *,
        said: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from conserve.jobs.harvest.time_left import Rate

        self._harvester, self._count_rows_left, self._clock = harvester, rows_left, clock
        self._begun = clock()
        self._rate = Rate()
        self._per_s = 0.0
        self._key: object = said
        self._line_at = self._begun + LINE_S
        self._rows = 0  # done and left at the last count
        self._count_at = self._begun

    @property
    def _tally(self) -> "Tally":
        return self._harvester.tally

    async def line(self) -> str | None:
        """Line that is due: at a new step, or 30 s after the last one; else None."""
        now = self._clock()
        step = self._harvester.doing
        working = step is None and (self._tally.in_flight or self._tally.done)
        if step is None:
            self._per_s = self._rate.look(now, self._harvester.progress(0).tokens)
        key = step or ((self._tally.waiting_for is not None) if working else self._key)
        if key == self._key and now < self._line_at:
            return None
        self._key, self._line_at = key, now + LINE_S
        if step is not None:
            return f"{step} ({now - self._begun:.0f} s)"
        rows_left = await self._rows_left()
        done = self._tally.done
        return f"{done:,}/{done + rows_left:,} rows, {self._pace(self._harvester.progress(rows_left))}"

    async def standing(self) -> ProgressNow:
        """Progress just now."""
        if (step := self._harvester.doing) is not None:
            return ProgressNow(step)
        rows_left = await self._rows_left()
        done = self._tally.done
        seen = self._harvester.progress(rows_left)
        self._per_s = self._rate.look(self._clock(), seen.tokens)
        return ProgressNow(None, done, done + rows_left, self._pace(seen))

    async def _rows_left(self) -> int:
        """Rows without a result, counted in a thread: the harvester's loop does not wait for the store."""
        if self._clock() >= self._count_at:
            self._count_at = self._clock() + COUNT_S
            done = self._tally.done
            # The harvester says that the store is out of reach; until it is back, the last count stands.
            with contextlib.suppress(StoreError):
                self._rows = done + await in_thread(self._count_rows_left)
        return max(0, self._rows - self._tally.done)

    def _pace(self, seen: "QueueProgress") -> str:
        """Tokens/s, rows in flight, time left, and the endpoint's fault if there is one."""
        from conserve.jobs.harvest.time_left import left_s

        per_s = self._per_s if self._rate.firm else 0.0
        parts = [] if seen.rows_done or not seen.rows_in_flight else [first_wave(seen)]
        parts += [f"{per_s:,.0f} tokens/s"] if per_s else []
        parts += [f"{seen.rows_in_flight:,} running"] if seen.rows_done or not parts else []
        parts += [time_left(seconds)] if (seconds := left_s(seen, per_s)) is not None else []
        parts += [f"{self._tally.failed:,} failed"] if self._tally.failed else []
        return ", ".join(parts) + (f" ({self._tally.waiting_for})" if self._tally.waiting_for else "")


def first_wave(seen: "QueueProgress") -> str:
    """Words for the time before the first answer: rows in flight, tokens so far."""
    return f"first wave of {seen.rows_in_flight:,}: {count(seen.tokens_in_flight, 'token')} so far"


def time_left(seconds: float) -> str:
    """Words for the time left: `about 4 min left`."""
    return f"about {rounded(seconds)} left"


def rounded(seconds: float) -> str:
    """Duration rounded to what an estimate can tell: `20 s`, `4 min`, `2 h 10 min`."""
    if seconds < 55:
        return f"{max(5, 5 * round(seconds / 5))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{max(1, minutes)} min"
    tens = round(minutes / 10)
    return f"{tens // 6} h" + (f" {tens % 6 * 10} min" if tens % 6 else "")
