"""Handle of a store: submit jobs, find them, query them."""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conserve.api import display
from conserve.api.asking import TaskRequest, unanswerable
from conserve.api.caller import warn
from conserve.api.deadlines import moment_of, on_late_of
from conserve.api.handing import Source, input_of
from conserve.api.job import Job
from conserve.api.queries import sql_query
from conserve.api.results import answered
from conserve.api.twins import blocking
from conserve.config import Settings
from conserve.errors import RowsUnanswerable
from conserve.store.books.job_names import namesakes
from conserve.store.books.job_terms import JobTerms
from conserve.store.books.readings import job_named, read_jobs

if TYPE_CHECKING:
    from conserve.jobs.requests.submit import Submitted
    from conserve.store.sql.relation import Relation

SHOWN_JOBS = 20


class Store:
    """Handle of a store. It holds no connection and may be pickled; the store's settings, keys too, go with it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @property
    def path(self) -> Path:
        """Folder of the store."""
        return self._settings.home

    def __repr__(self) -> str:
        return f"<conserve.Store {self._settings.home}>"

    @blocking
    def submit(
        self,
        source: Source,
        *,
        prompt: str | None = None,
        messages: str | None = None,
        system: str | None = None,
        completions: bool = False,
        params: Mapping[str, Any] | None = None,
        schema: Mapping[str, Any] | None = None,
        id: str | None = None,
        model: str | None = None,
        name: str | None = None,
        tags: Mapping[str, str] | None = None,
        priority: int = 0,
        deadline: datetime | timedelta | None = None,
        on_late: str | None = None,
        order: str = "prefix",
        format: str | None = None,
        keep_input: str | None = None,
        constant_prompt: bool = False,
        unknown_params: bool = False,
    ) -> Job:
        """Queue a job; once it is returned, it is durable.

        `source` is a path, a pattern or a folder, or several; a pyarrow Table or dataset, a pandas or polars
        frame, a DuckDB relation; or dicts. `prompt` is a Jinja template over a row's columns, `messages` a column
        of chats; without both the rows are OpenAI Batch lines. `params` are fields of each request, as
        `{"max_tokens": 128}`. `schema` is a JSON schema that answers obey. `deadline` is a moment, or a length of
        time from now; `on_late` is "expire", "best-effort" or "push". The others are flags of `conserve submit`. A
        table and dicts are copied into the store. Warns with `RowsUnanswerable` of rows that cannot be sent.
        """
        from conserve.jobs.requests.submit import submit
        from conserve.store.database.store import Store as Database

        settings = self._settings
        terms = JobTerms(
            name=name,
            priority=priority,
            model=model,
            tags=tags or {},
            deadline=moment_of(deadline),
            on_late=on_late_of(on_late, deadline),
        )
        task = TaskRequest(
            prompt=prompt,
            messages=messages,
            system=system,
            completions=completions,
            id_column=id,
            order=order,
            params=params or {},
            schema=schema,
            unknown_params=unknown_params,
        ).task()
        given = input_of(source, form=format, keep=keep_input, copy_gib=settings.input_copy_gib)
        with closing(Database.open(settings)) as database:
            done = submit(database, given, task, terms, constant_prompt=constant_prompt)
        return self._handle(done)

    @blocking
    def jobs(self, *, tags: Mapping[str, str] | None = None) -> list[Job]:
        """All jobs, oldest first; with `tags`, those that have each of them."""
        wanted = (tags or {}).items()
        readings = read_jobs(self._settings, now=time.time())
        return [Job(self._settings, job.id) for job in readings if wanted <= job.tags.items()]

    @blocking
    def job(self, name: str) -> Job:
        """Job with this id, or the only one whose id begins so, or the newest of this name; "last" is the newest.

        Others may have queued jobs of this name too; `jobs(tags=...)` finds those of a tag. Raises `JobNotFound`,
        which names the nearest.
        """
        known = read_jobs(self._settings, now=time.time())
        same = namesakes([reading.id for reading in known], name)
        return Job(self._settings, same[-1] if same else job_named(self._settings, known, name))

    @blocking
    def sql(
        self,
        query: str,
        *,
        jobs: Sequence[str] | None = None,
        files: Mapping[str, str | Path] | None = None,
    ) -> "Relation":
        """Answer of one SELECT over the views of jobs and of evaluations, as a DuckDB relation.

        A child process computes it, sealed off from all but the store and `files`, which are tables by name. The
        relation holds the answer, on DuckDB's default connection, so that it joins tables and frames of yours.
        Times are in UTC, without a zone. Raises `QueryError` for a mistake and `QueryTooGreedy` beyond the
        settings' bounds.
        """
        from conserve.store.sql.relation import relation

        named = [f"{name}={path}" for name, path in (files or {}).items()]
        with answered(sql_query(self._settings, query, jobs=jobs, named=named), joins=False) as rows:
            return relation(rows)

    def _handle(self, done: "Submitted") -> Job:
        """Handle of a new job; warns of its rows that cannot be sent."""
        if (sentence := unanswerable(done)) is not None:
            warn(sentence, RowsUnanswerable)
        return Job(self._settings, done.job_id)

    def _repr_html_(self) -> str:
        readings = read_jobs(self._settings, now=time.time())[::-1]
        rows = [(job.id, job.state.value, f"{job.done:,} / {job.rows:,}", job.failed) for job in readings]
        return display.table_html(("job", "state", "rows", "failed"), rows[:SHOWN_JOBS])
