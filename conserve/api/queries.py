"""Queries over a store as it is now: the results of one job, and SQL over the views."""

import os
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from conserve.config import Settings
from conserve.errors import StoreError, UsageError

if TYPE_CHECKING:
    from conserve.store.books.catalog import JobRecord
    from conserve.store.sql.answer import SnapshotQuery
    from conserve.store.sql.readable import LeftOut
    from conserve.store.sql.snapshot import Snapshot


def results_query(
    settings: Settings, job: str, *, with_inputs: bool, with_prompts: bool, with_urls: bool = False
) -> "tuple[JobRecord, SnapshotQuery]":
    """Job of this name, and the query for the results that it has now, in the order of its input.

    `with_urls` adds the route of each row instead of the input's columns and the prompts.
    """
    from conserve.api.bounds import export_bounds
    from conserve.jobs.requests.wording import Tasks
    from conserve.store.books import catalog
    from conserve.store.database.store import Store
    from conserve.store.sql import export
    from conserve.store.sql.answer import SnapshotQuery
    from conserve.store.sql.snapshot import snapshot

    with closing(Store.open_to_read(settings)) as store:
        with store.read() as tx:
            found = catalog.get(tx, job)
        uses = (
            {"results"} | ({"inputs"} if with_inputs else set()) | ({"requests"} if with_prompts else set())
        )
        taken = snapshot(store, now=time.time(), only=[found.id], used=uses)
    if with_urls:
        ask = lambda duck: export.with_urls(duck, taken.data, found.id)  # noqa: E731
    else:
        ask = lambda duck: export.ordered(  # noqa: E731
            duck, found.id, with_inputs=with_inputs, with_prompts=with_prompts
        )
    return found, SnapshotQuery(
        taken=taken,
        ask=ask,
        uses=lambda empty: uses,
        bounds=export_bounds(settings),
        sealed=False,
        wording=Tasks(taken.catalog),
        changed=lambda: changed(settings, taken),
    )


def sql_query(
    settings: Settings,
    text: str,
    *,
    jobs: Sequence[str] | None = None,
    named: Sequence[str] = (),
    limit: int | None = None,
) -> "SnapshotQuery":
    """Query over the store as it is now; `limit` cuts its rows, `named` are files as NAME=PATH."""
    from conserve.api.bounds import query_bounds
    from conserve.jobs.requests.wording import Tasks
    from conserve.store.books import catalog
    from conserve.store.database.store import Store
    from conserve.store.sql.answer import SnapshotQuery
    from conserve.store.sql.named_files import named_file
    from conserve.store.sql.query import ask, views_named, views_of
    from conserve.store.sql.snapshot import snapshot

    bounds, files = query_bounds(settings), tuple(named_file(one) for one in named)
    with closing(Store.open_to_read(settings)) as store:
        with store.read() as tx:
            only = [catalog.get(tx, name).id for name in jobs] if jobs else None
        taken = snapshot(store, now=time.time(), only=only, used=views_named(text))
    return SnapshotQuery(
        taken=taken,
        ask=lambda duck: ask(duck, text, limit=limit),
        uses=lambda empty: views_of(empty, text),
        bounds=bounds,
        wording=Tasks(taken.catalog),
        named=files,
        changed=lambda: changed(settings, taken),
    )


def changed(settings: Settings, taken: "Snapshot") -> set[str]:
    """Jobs that were retried, repaired or removed since a snapshot; none if the store cannot be asked now."""
    from conserve.store.database.store import Store
    from conserve.store.sql.snapshot import changed_since

    with suppress(StoreError), closing(Store.open_to_read(settings)) as store:
        return changed_since(store, taken)
    return set()


def check_output(out: Path, job: "JobRecord") -> None:
    """Raise `UsageError` for a file from which a job reads its input rows: results in its place would end them."""
    referenced = (
        [part.path for part in job.source.files if part.kept is None] if not job.source.copied else []
    )
    if os.path.realpath(out) in map(os.path.realpath, referenced):
        raise UsageError(f"job {job.id} reads its input from {out}; name another file")


def check_join(gap: "LeftOut") -> None:
    """Raise if rows that a view leaves out would drop results of a join with it."""
    if gap.view == "inputs":
        raise UsageError(f"the inputs cannot be joined: {gap.reason}; leave out --with-inputs")
    if gap.view == "requests":
        raise UsageError(f"the prompts cannot be shown: {gap.reason}; leave out --with-prompts")
