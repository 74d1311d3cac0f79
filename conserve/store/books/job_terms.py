"""Terms on which a job is queued."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from conserve.store.books.states import OnLate


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTerms:
    """Name of a job, its turn, the model that answers it, its tags and its deadline."""

    name: str | None = None  # that its id begins with; None: the input's
    priority: int = 0
    model: str | None = None  # None: that of the first run
    tags: Mapping[str, str] = field(default_factory=dict)
    deadline: float | None = None  # when it is to be done, s since 1970
    on_late: OnLate | None = None  # then, with rows left; None: it expires
