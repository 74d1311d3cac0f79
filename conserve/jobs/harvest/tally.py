"""The tally: counts of a harvester's work, for its progress display and its summary."""

from collections import Counter
from dataclasses import dataclass, field

from conserve.endpoints.protocol import Completion
from conserve.store.books.journal import Committed


@dataclass(slots=True)
class Tally:
    """Counts since the start of a harvester."""

    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    late: int = 0  # answers thrown away because the lease had gone
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    resumed_tokens: int = 0
    leases_lost: int = 0  # that others ended, since their end had passed
    outages: Counter[str] = field(default_factory=Counter)  # of the `store` and of the `endpoint`
    in_flight: int = 0
    answered: int = 0  # rows, whether durable by now or not
    no_json: int = 0  # of answered rows: whole answers that are not the JSON that was asked for
    answered_tokens: int = 0  # of answered rows: prompts and answers
    waiting_for: str | None = None  # why nothing runs just now
    jobs: list[str] = field(default_factory=list)  # jobs that it leased rows of
    completed: list[str] = field(default_factory=list)  # jobs that it wrote the last result of
    cancelled: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # job id -> reason

    @property
    def done(self) -> int:
        """Rows that have a result because of this harvester."""
        return self.succeeded + self.failed

    def begin(self, job_id: str) -> None:
        """Note that rows of this job were leased; a job that had ended has then come back (`conserve retry`)."""
        if job_id not in self.jobs:
            self.jobs.append(job_id)
        for ended in (self.completed, self.cancelled):
            if job_id in ended:
                ended.remove(job_id)

    def answer(self, completion: Completion, *, no_json: bool = False) -> None:
        """Count a row that was answered, before it is durable."""
        self.answered += 1
        self.no_json += no_json
        self.answered_tokens += completion.prompt_tokens + completion.completion_tokens

    def count(self, committed: Committed) -> None:
        """Count the rows of a committed transaction."""
        self.late += len(committed.late)
        self.completed += committed.completed
        # The last rows of a job may have been in flight when it expired.
        self.cancelled = [job_id for job_id in self.cancelled if job_id not in committed.completed]
        for result in (finished.result for finished in committed.written):
            self.failed += result.failed
            self.succeeded += not result.failed
            self.prompt_tokens += result.prompt_tokens
            self.completion_tokens += result.completion_tokens
            self.cached_tokens += result.cached_tokens
            self.resumed_tokens += result.resumed_tokens
