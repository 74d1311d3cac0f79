"""Turns of jobs at a claim: by priority, then by deadline, as the slack order says."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from math import inf

from conserve.jobs.deadlines.forecast import finite, forecasts
from conserve.jobs.deadlines.rate import Rates
from conserve.jobs.deadlines.slack import SlackOrder, claim_order, slack_order
from conserve.jobs.deadlines.work import QueuedJob, queued_job, usual_row_tokens, work_of
from conserve.store.books import harvested
from conserve.store.books.shapes import RunnableRow
from conserve.store.books.states import OnLate
from conserve.store.database.store import Store

LOOK_S = 60.0  # between two readings of the rate of harvested tokens, and two forecasts
COURSES = 100  # of a forecast


class Turns:
    """Orders the runnable jobs of a harvester."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock
        self._claims: Counter[Hashable] = Counter()  # of each group that shares tokens with others
        self._turn = 0  # number of the newest claim among its group's
        self._rates = Rates({})
        self._tokens_per_s: float | None = None
        self._look_at = 0.0
        self._late = frozenset[str]()  # jobs that may push and whose 90 % forecast is behind their deadline
        self._foreseen_at = -inf
        self.pushing: frozenset[str] = frozenset()  # ids of jobs of the newest claim whose rows push

    def ordered(
        self, runnable: Sequence[RunnableRow], *, now: float, group: Hashable | None = None
    ) -> list[QueuedJob]:
        """Jobs in the order of this claim, which is of a group of its own, or of all jobs."""
        self._claims[group] += 1
        self._turn = self._claims[group]
        usual = usual_row_tokens(runnable)
        found = claim_order([candidate(job, usual, now) for job in runnable], self._turn)
        self.pushing = self._late & {job.id for job in found if job.pushes}
        return found

    def is_to_foresee(self, runnable: Sequence[RunnableRow], now: float) -> bool:
        """True if a forecast is due of which of all runnable jobs push: `LOOK_S` after the end of the last one.

        A job that comes meanwhile does not push before. With thousands of jobs a forecast takes seconds.
        """
        if self._foreseen_at <= now < self._foreseen_at + LOOK_S:
            return False
        return any(job.on_late == OnLate.PUSH and candidate(job, 0.0, now).pushes for job in runnable)

    def foresee(self, runnable: Sequence[RunnableRow], now: float) -> None:
        """Find the jobs that would miss their deadline without a push, as the 90 % forecast has it.

        No transaction should be open meanwhile.
        """
        self._rate(now)
        usual = usual_row_tokens(runnable)
        jobs = {job.id: candidate(job, usual, now) for job in runnable}
        found = forecasts(list(jobs.values()), self._rates, now=now, courses=COURSES)
        self._late = frozenset(
            id_
            for id_, forecast in found.items()
            if jobs[id_].pushes and finite(forecast.done_90) > finite(jobs[id_].deadline)
        )
        self._foreseen_at = self._clock()  # the forecast took its time

    def before(self, ordered: Sequence[QueuedJob], first: QueuedJob) -> list[QueuedJob]:
        """Jobs whose rows that came back go before fresh rows, of which those of `first` go now.

        Rows of jobs without a deadline share prefixes, so that none of these jobs is before another.
        """
        ahead = list(ordered[: ordered.index(first) + 1])
        if first.deadline is not None:
            return ahead
        alike = [job for job in ordered if job.deadline is None and job.priority == first.priority]
        return list(dict.fromkeys([*ahead, *alike]))

    def order(self, jobs: Sequence[QueuedJob]) -> SlackOrder:
        """Slack order among jobs of one priority."""
        if all(job.deadline is None for job in jobs):
            return SlackOrder()
        now = self._clock()
        return slack_order(jobs, now=now, tokens_per_s=self._rate(now))

    def _rate(self, now: float) -> float | None:
        """Tokens per second to expect of the hours to come; None before any were harvested."""
        if self._is_to_look(now):
            self._look_at = now + LOOK_S
            with self._store.read() as tx:
                self._rates = Rates.of(harvested.slots(tx))
            self._tokens_per_s = self._rates.mean(now)
        return self._tokens_per_s

    def _is_to_look(self, now: float) -> bool:
        return not self._look_at - LOOK_S <= now < self._look_at


def candidate(job: RunnableRow, usual_tokens: float, now: float) -> QueuedJob:
    """A runnable job with its predicted work."""
    work = work_of(job, job.num_rows - job.succeeded - job.failed, usual_tokens)
    return queued_job(job, job.seq, work, now=now, next_position=job.next_position, num_rows=job.num_rows)
