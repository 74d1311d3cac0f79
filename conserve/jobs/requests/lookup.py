"""Look-up of one row's request, by its row index or its custom id."""

from dataclasses import dataclass

from conserve.errors import UsageError
from conserve.jobs.requests.file import RequestFile, StoredRequest
from conserve.jobs.requests.wording import Tasks
from conserve.store.books.catalog import JobRecord
from conserve.store.database.store import Store
from conserve.store.files import layout


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRequest:
    """A row's request, its position, its body and its prompt; the last two are None where rendering failed."""

    position: int
    request: StoredRequest
    body: str | None
    prompt: str | None


def find_request(
    store: Store, job: JobRecord, *, row_index: int | None = None, custom_id: str | None = None
) -> FoundRequest:
    """Find the request of a row by its row index or its custom id; raises `UsageError` if there is none."""
    if not may_be_there(job, row_index, custom_id):
        raise UsageError(missing(job, row_index, custom_id))
    requests = RequestFile(layout.requests_file(store.data, job.id))
    try:
        wanted = ("row_index", row_index) if custom_id is None else ("custom_id", custom_id)
        position = requests.position_of(*wanted)
        if position is None:
            raise UsageError(missing(job, row_index, custom_id))
        (request,) = requests.read([position])
    finally:
        requests.close()
    if request.payload is None:
        return FoundRequest(position=position, request=request, body=None, prompt=None)
    tasks = Tasks([job])
    body, prompt = tasks.body(job.id, request.payload), tasks.prompt(job.id, request.payload)
    return FoundRequest(position=position, request=request, body=body, prompt=prompt)


def may_be_there(job: JobRecord, row_index: int | None, custom_id: str | None) -> bool:
    """False for a row beyond the job's last, and for an id that is not UTF-8."""
    try:
        (custom_id or "").encode()
    except UnicodeEncodeError:
        return False
    return row_index is None or row_index < job.num_rows


def missing(job: JobRecord, row_index: int | None, custom_id: str | None) -> str:
    """Sentence for a row that does not exist."""
    if custom_id is not None:
        return f"no row of job {job.id} has the id {custom_id!r}; rows are also named by number, from 0"
    return f"job {job.id} has no row {row_index}; its rows go from 0 to {job.num_rows - 1}"
