"""The deadline of a job that is about to be queued, and whether it will be kept."""

import time
from dataclasses import dataclass
from typing import Self

from conserve.cli import output
from conserve.cli.deadline import moment_of, on_late_of, say_push
from conserve.config import Settings
from conserve.errors import JobRefused, UsageError
from conserve.store.books.states import OnLate

UNKNOWN = "rows have run for less than {:g} s here, so there is no forecast, and --strict lets the job pass"


@dataclass(slots=True, kw_only=True)
class DeadlineFlags:
    """Deadline flags of `conserve submit`."""

    deadline: float | None
    on_late: OnLate | None
    strict: bool
    warning: str | None = None  # once `check` has found that the deadline may be missed

    @classmethod
    def of(cls, by: str | None, within: str | None, on_late: str | None, *, strict: bool) -> Self:
        """Read the flags; raises `UsageError` for flags that only mean something beside a deadline."""
        deadline = moment_of(by, within, now=time.time())
        for flag, is_given in (("--on-late", on_late is not None), ("--strict", strict)):
            if is_given and deadline is None:
                raise UsageError(f"{flag} wants a deadline; give --by or --within too")
        return cls(deadline=deadline, on_late=on_late_of(on_late), strict=strict)

    def check(self, settings: Settings, priority: int, rows: int) -> None:
        """Forecast a job of so many rows; with --strict, raises `JobRefused` if it will not make its deadline."""
        if self.deadline is None:
            return
        from conserve.cli.forecast_report import warning
        from conserve.jobs.deadlines.queue import forecast_new
        from conserve.jobs.deadlines.rate import LEAST_BUSY_S
        from conserve.store.books.readings import read_harvested, read_jobs

        now = time.time()
        found = forecast_new(
            read_jobs(settings, now=now),
            read_harvested(settings),
            rows=rows,
            priority=priority,
            deadline=self.deadline,
            now=now,
        )
        if found is None:
            self.warning = UNKNOWN.format(LEAST_BUSY_S) if self.strict else None
            return
        self.warning = warning(found, self.deadline, now)
        if self.warning and self.strict:
            raise JobRefused(f"the job {self.warning}; give it more time, or leave out --strict")

    def tell(self) -> None:
        """Print what a push needs, and that the deadline may be missed."""
        say_push(self.on_late)
        if self.warning:
            output.say(f"warning: {self.warning}")
