"""The tally: counts of a harvester's work, for its progress display and its summary."""

from collections import Counter
from dataclasses import dataclass, field

from conserve.endpoints.protocol import Completion
from conserve.errors import JobRefused
from conserve.store.books.journal import Committed


@dataclass(slots=True)
class Tally:
    """Counts since the start of a harvester. Jobs are keys, in order: it may see hundreds of thousands of them."""

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
    jobs: dict[str, None] = field(default_factory=dict)  # jobs that it leased rows of
    completed: dict[str, None] = field(default_factory=dict)  # jobs that it wrote the last result of
    cancelled: dict[str, None] = field(default_factory=dict)
    refused: dict[str, JobRefused] = field(default_factory=dict)  # job id -> reason

    @property
    def done(self) -> int:
        """Rows that have a result because of this harvester."""
        return self.succeeded + self.failed

    def begin(self, job_id: str) -> None:
        """Note that rows of this job were leased; a job that had ended has then come back (`conserve retry`)."""
        self.jobs[job_id] = None
        for ended in (self.completed, self.cancelled):
            ended.pop(job_id, None)

    def answer(self, completion: Completion, *, no_json: bool = False) -> None:
        """Count a row that was answered, before it is durable."""
        self.answered += 1
        self.no_json += no_json
        self.answered_tokens += completion.prompt_tokens + completion.completion_tokens

    def count(self, committed: Committed) -> None:
        """Count the rows of a committed transaction."""
        self.late += len(committed.late)
        self.completed |= dict.fromkeys(committed.completed)
        for job_id in committed.completed:  # its last rows may have been in flight when it expired
            self.cancelled.pop(job_id, None)
        for result in (finished.result for finished in committed.written):
            self.failed += result.failed
            self.succeeded += not result.failed
            self.prompt_tokens += result.prompt_tokens
            self.completion_tokens += result.completion_tokens
            self.cached_tokens += result.cached_tokens
            self.resumed_tokens += result.resumed_tokens
