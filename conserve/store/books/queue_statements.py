"""Statements with which harvesters look at the queue, several times a second; each is made once.

To make one and to tell it from others takes SQLAlchemy longer than SQLite takes to answer it.
"""

from collections.abc import Collection
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, and_, bindparam, case, func, or_, select

from conserve.store.books.states import JobState
from conserve.store.database import schema

job, request, span = schema.job, schema.request, schema.span

RUNNABLE = (
    *(
        job.c.id,
        job.c.seq,
        job.c.priority,
        job.c.next_position,
        job.c.num_rows,
        job.c.deadline,
        job.c.on_late,
    ),
    *(job.c.succeeded, job.c.failed, job.c.prompt_tokens, job.c.completion_tokens, job.c.cached_tokens),
)
"""Columns of a job that its turn follows from, as `shapes.RunnableRow` has them."""


class Looks(NamedTuple):
    """Statements about the runnable jobs."""

    jobs: Select[Any]
    """By priority, then by age."""
    live: Select[Any]
    """Their `request` rows: those under a lease, those that wait, and when the first of these may run."""
    in_spans: Select[Any]
    """Number of their rows in spans."""


def looks(
    only: Collection[str] | None, model: str | None, but: Collection[str] = (), seq: int | None = None
) -> tuple[Looks, dict[str, Any]]:
    """Statements and their parameters: of all queued jobs or of these, `but` some; with a model, of its own.

    With a `seq` they are of the job with that number alone.
    """
    parameters: dict[str, Any] = {} if model is None else {"model": model}
    if only is not None:
        parameters["only"] = list(only)
    if but:
        parameters["but"] = list(but)
    if seq is not None:
        parameters["seq"] = seq
    kind = {"of_model": model is not None, "of_some": only is not None, "but_some": bool(but)}
    return made(**kind, of_one=seq is not None), parameters


@cache
def made(*, of_model: bool, of_some: bool, but_some: bool, of_one: bool) -> Looks:
    """Statements of a kind."""
    ours = [is_runnable(bindparam("model") if of_model else None)]
    if of_some:
        ours.append(job.c.id.in_(bindparam("only", expanding=True)))
    if but_some:
        ours.append(job.c.id.not_in(bindparam("but", expanding=True)))
    if of_one:
        ours.append(job.c.seq == bindparam("seq"))
    waiting = request.c.epoch.is_(None)
    counted: tuple[Any, ...] = (
        func.count(request.c.epoch),
        func.count(case((waiting, 1))),
        func.min(case((waiting, request.c.available_at))),
    )
    return Looks(
        select(*RUNNABLE).where(*ours).order_by(job.c.priority.desc(), job.c.seq),
        select(*counted).join(job, job.c.id == request.c.job_id).where(*ours),
        select(func.sum(span.c.held)).join(job, job.c.id == span.c.job_id).where(*ours),
    )


def is_runnable(model: Any) -> ColumnElement[bool]:
    """Condition that a job is queued, and that the model (a name or a parameter) may answer it, if any is given."""
    queued = job.c.state == JobState.QUEUED.value
    return queued if model is None else and_(queued, may_answer(model))


def may_answer(model: Any) -> ColumnElement[bool]:
    """Condition that a job is bound to this model, or to none yet."""
    return or_(job.c.model.is_(None), job.c.model == model)
