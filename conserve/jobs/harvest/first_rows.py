"""The first rows of a job: where all are refused in the same words, the job's parameters are at fault."""

from collections.abc import Collection
from dataclasses import dataclass

from conserve.endpoints.protocol import Call, Completion, Endpoint, OnTokens
from conserve.endpoints.wrapped import WrappedEndpoint
from conserve.errors import EndpointUnusable, RequestRejected

FIRST_ROWS = 20


@dataclass(slots=True)
class SameRefusals:
    """Refusals of a job's rows, all in the same words so far."""

    words: str
    rows: int = 1


class FirstRowsEndpoint(WrappedEndpoint):
    """An endpoint that stops the run if the first rows of one of the jobs `new` are refused in the same words.

    A row that is answered, or refused in other words, ends the watch over its job.
    """

    def __init__(self, endpoint: Endpoint, new: Collection[str]) -> None:
        super().__init__(endpoint)
        self._watched: dict[str, SameRefusals | None] = dict.fromkeys(new)

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        """Answer a call; raises `EndpointUnusable` where a job's rows are all refused."""
        job_id = call.key.partition("/")[0]
        try:
            completion = await self._endpoint.complete(call, on_tokens)
        except RequestRejected as error:
            if job_id in self._watched:
                self._note(job_id, error)
            raise
        self._watched.pop(job_id, None)
        return completion

    def _note(self, job_id: str, error: RequestRejected) -> None:
        seen = self._watched[job_id]
        if seen is None:
            self._watched[job_id] = SameRefusals(str(error))
        elif seen.words != str(error):
            del self._watched[job_id]
        else:
            seen.rows += 1
            if seen.rows >= FIRST_ROWS:
                raise EndpointUnusable(all_refused(job_id, error), status=error.status) from error


def all_refused(job_id: str, error: RequestRejected) -> str:
    """Sentence on a job whose first rows were all refused, with the ways to go on."""
    said = str(error).rstrip(". ")
    return (
        f"the first {FIRST_ROWS} rows of job {job_id} were refused in the same words, so the others wait: {said}; "
        f"a job keeps its parameters: run: conserve cancel {job_id}, and submit the rows with others (as --param "
        f"max_completion_tokens=N in place of --max-tokens N); or send the others too: conserve run {job_id}; "
        "rows of other jobs: conserve run JOB"
    )
