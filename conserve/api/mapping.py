"""A job in one line: submit a table, run it, read its answers beside its columns."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from conserve.api.engines import Engine
from conserve.api.handing import Source
from conserve.api.opening import open as open_store
from conserve.api.results import Results
from conserve.api.running import ProfileFlags, check_endpoint
from conserve.api.runs import RunArguments, run_now
from conserve.api.store import Store
from conserve.api.twins import PortalCall
from conserve.config import Settings
from conserve.errors import ConserveError


@PortalCall
async def map(
    source: Source,
    prompt: str | None = None,
    *,
    messages: str | None = None,
    system: str | None = None,
    params: Mapping[str, Any] | None = None,
    schema: Mapping[str, Any] | None = None,
    model: str | None = None,
    endpoint: str | None = None,
    engine: Engine | None = None,
    engine_args: Sequence[str] = (),
    store: Store | None = None,
    name: str | None = None,
    constant_prompt: bool = False,
    unknown_params: bool = False,
    progress: bool = True,
) -> Results:
    """Ask a model each row of a table, and return the answers beside its columns.

    The rows are a job of `store`, by default the command line's. If the program ends before they are answered,
    `store.job("last").run()` goes on; its id begins with `name`. Where nothing could be asked, no job is left.
    Arguments are those of `store.submit` and of `job.run`, which take more.
    """
    opened = store or await open_store.aio()
    asked = RunArguments(
        model=model, endpoint=endpoint, engine=engine, engine_args=engine_args, progress=progress
    )
    check_endpoint(asked.settings(opened._settings), engine_args, ProfileFlags())
    job = await opened.submit.aio(
        source,
        prompt=prompt,
        messages=messages,
        system=system,
        params=params,
        schema=schema,
        name=name,
        constant_prompt=constant_prompt,
        unknown_params=unknown_params,
    )
    try:
        await run_now(opened._settings, job.id, asked)
    except ConserveError as error:
        if not await asyncio.to_thread(withdrawn, opened._settings, job.id):
            error.add_note(f"its rows are job {job.id}, and store.job({job.id!r}).run() goes on with them")
        raise
    return job.results(with_inputs=True)


def withdrawn(settings: Settings, job_id: str) -> bool:
    """Remove the job if no row of it was ever asked; returns False if one was."""
    from conserve.store.books.withdraw import withdraw
    from conserve.store.database.store import Store as Database

    with closing(Database.open(settings)) as database:
        return withdraw(database, job_id)
