"""Turns of jobs at a claim: by priority, then by deadline, as the slack order says."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from conserve.jobs.deadlines.rate import Rates
from conserve.jobs.deadlines.slack import (
    SHARE,
    Demand,
    SlackOrder,
    claim_order,
    is_others_turn,
    late_jobs,
    slack_order,
)
from conserve.jobs.deadlines.work import usual_row_tokens, work_of
from conserve.store.books import harvested
from conserve.store.books.states import OnLate
from conserve.store.database.store import Store

LOOK_S = 60.0  # between two readings of the rate of harvested tokens


class RunnableJob(NamedTuple):
    """A runnable job; `deadline` is None once it has passed and the job goes on all the same."""

    id: str
    seq: int
    priority: int
    next_position: int
    num_rows: int
    deadline: float | None
    tokens_left: float
    pushes: bool = False  # near its deadline it may take more of what live requests bear


class Turns:
    """Orders the runnable jobs of a harvester."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock
        self._claims: Counter[Hashable] = Counter()  # of each group that shares tokens with others
        self._turn = 0  # number of the newest claim among its group's
        self._tokens_per_s: float | None = None
        self._look_at = 0.0
        self.pushing: frozenset[str] = frozenset()  # ids of jobs that do so now

    def ordered(
        self, runnable: Sequence[Any], *, now: float, group: Hashable | None = None
    ) -> list[RunnableJob]:
        """Jobs in the order of this claim, which is of a group of its own, or of all jobs."""
        self._claims[group] += 1
        self._turn = self._claims[group]
        usual = usual_row_tokens(runnable)
        found = claim_order([candidate(job, usual, now) for job in runnable], self._turn)
        if any(job.pushes for job in found):
            late = set(late_jobs(found, now=now, tokens_per_s=self._rate(now)))
            self.pushing = frozenset(job.id for job in found if job.pushes and job.id in late)
        elif group is None:
            self.pushing = frozenset()
        return found

    def of_this_claim(self, ordered: Sequence[RunnableJob]) -> list[RunnableJob]:
        """Jobs whose rows that came back go now: without deadlines only on the turns kept for them."""
        dated = [job for job in ordered if job.deadline is not None]
        return dated if dated and not is_others_turn(self._turn, SHARE) else list(ordered)

    def order(self, jobs: Sequence[RunnableJob]) -> SlackOrder:
        """Slack order among jobs of one priority."""
        if all(job.deadline is None for job in jobs):
            return SlackOrder()
        now = self._clock()
        demands = [Demand(seq=job.seq, tokens_left=job.tokens_left, deadline=job.deadline) for job in jobs]
        return slack_order(demands, now=now, tokens_per_s=self._rate(now))

    def _rate(self, now: float) -> float | None:
        """Tokens per second to expect of the hours to come; None before any were harvested."""
        if not self._look_at - LOOK_S <= now < self._look_at:
            self._look_at = now + LOOK_S
            with self._store.read() as tx:
                self._tokens_per_s = Rates.of(harvested.slots(tx)).mean(now)
        return self._tokens_per_s


def candidate(job: Any, usual_tokens: float, now: float) -> RunnableJob:
    """A runnable job with its predicted work."""
    left = work_of(job, job.num_rows - job.succeeded - job.failed, usual_tokens).tokens
    to_come = job.deadline is not None and job.deadline > now
    deadline = job.deadline if to_come else None
    pushes = deadline is not None and job.on_late == OnLate.PUSH
    return RunnableJob(job.id, job.seq, job.priority, job.next_position, job.num_rows, deadline, left, pushes)
