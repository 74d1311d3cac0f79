"""The state of a running API, and the caller of a request."""

from dataclasses import dataclass, field
from typing import Any, Self

from starlette.requests import Request

from conserve.batch_api.deleted import DeletedFiles
from conserve.batch_api.foresight import Foresight
from conserve.batch_api.moved import MoveWatch
from conserve.batch_api.polls import Polls
from conserve.batch_api.reads import Reads
from conserve.batch_api.streams import Streams
from conserve.batch_api.workers import Admissions, Deliveries
from conserve.jobs.batches.lines import Limits
from conserve.store.books.keys import ApiKey
from conserve.store.database.migrations import DEFAULT_PROJECT
from conserve.store.database.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCaller:
    """Sender of a request, as its key tells."""

    project: str = DEFAULT_PROJECT
    key: ApiKey | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiState:
    """Parts that every route uses."""

    store: Store
    limits: Limits
    admissions: Admissions
    deliveries: Deliveries
    moves: MoveWatch
    streams: Streams
    foresight: Foresight
    reads: Reads
    polls: Polls
    deleted: DeletedFiles = field(default_factory=DeletedFiles)

    @classmethod
    def of(cls, request: Request) -> Self:
        """State of the API that answers the request."""
        found: Any = request.app.state.conserve_api
        assert isinstance(found, cls)
        return found


CALLER = "conserve_caller"  # in a request's scope


def caller_of(request: Request) -> ApiCaller:
    """Sender of a request; the default project's where no key is asked for."""
    found = request.scope.get(CALLER)
    return found if isinstance(found, ApiCaller) else ApiCaller()
