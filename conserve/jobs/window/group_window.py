"""Window of one group of jobs, kept from claim to claim."""

from collections.abc import Sequence
from dataclasses import dataclass

from conserve.jobs.window.lookahead import Lookahead
from conserve.jobs.window.shares import Group
from conserve.store.books import choice
from conserve.store.books.shapes import ClaimableJob
from conserve.store.database.store import Transaction


@dataclass(slots=True)
class GroupWindow:
    """Rows that a group's claims may choose from; without shares all jobs are one group, None."""

    group: Group | None
    lookahead: Lookahead | None = None  # once several jobs had rows to choose from
    only_job: str | None = None  # the one job with rows, if none of them was passed over

    def is_to_choose(self, tx: Transaction, jobs: Sequence[ClaimableJob]) -> bool:
        """True if the window chooses: several jobs have rows, or the only one has rows that were passed over."""
        if len(jobs) != 1:
            self.only_job = None
            return bool(jobs)
        if jobs[0].id != self.only_job and choice.passed_over(tx, jobs[0].id, limit=1):
            return True
        self.only_job = jobs[0].id
        return False

    def close(self) -> None:
        """Close the files that the window reads requests from."""
        if self.lookahead is not None:
            self.lookahead.close()
