"""A job in one line: submit a table, run it, read its answers beside its columns."""

from collections.abc import Mapping, Sequence
from typing import Any

from conserve.api.engines import Engine
from conserve.api.handing import Source
from conserve.api.opening import open as open_store
from conserve.api.results import Results
from conserve.api.store import Store
from conserve.api.twins import PortalCall


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
    progress: bool = True,
) -> Results:
    """Ask a model each row of a table, and return the answers beside its columns.

    The rows are a job of `store`, by default the command line's. If the program ends before they are answered,
    `store.job("last").run()` goes on; its id begins with `name`.
    """
    opened = store or await open_store.aio()
    job = await opened.submit.aio(
        source, prompt=prompt, messages=messages, system=system, params=params, schema=schema, name=name
    )
    await job.run.aio(
        model=model, endpoint=endpoint, engine=engine, engine_args=engine_args, progress=progress
    )
    return job.results(with_inputs=True)
