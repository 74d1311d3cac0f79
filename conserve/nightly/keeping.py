"""Runs in the store's folder: records that are whole or not there, files of items, names, and a lock.

Each ended suite is written at once, so that a killed run begins again with the first suite that has not ended.
"""

import json
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from conserve.errors import StoreDamaged, UsageError
from conserve.evals.outcome import Item
from conserve.evals.records import HISTORY, PREVIOUS, RunRecord, RunState, SuiteRecord
from conserve.nightly.redacted import overrides_of, plan_text_of
from conserve.store.files import home as store_home
from conserve.store.files import nights
from conserve.store.sql.eval_views import ITEMS
from conserve.whole import sync, write_whole

ROWS_AT_ONCE = 1000
NAME_TAKEN = ("last", PREVIOUS, HISTORY)


def new_id(home: Path, evaluation: str, *, now: float) -> str:
    """Id of a new run: the evaluation's name and the local time; a number tells runs of one minute apart."""
    stem = f"{evaluation}-{datetime.fromtimestamp(now):%Y%m%d-%H%M}"
    known = {run.id for run in runs(home)}
    return next(one for n in range(1, 10_000) if (one := stem if n == 1 else f"{stem}-{n}") not in known)


def write(home: Path, run: RunRecord) -> None:
    """Write a run's record, durably; that of a run which has ended, and needs no password any more, without any."""
    if run.state is not RunState.RUNNING:
        run = replace(run, plan=plan_text_of(run.plan), overrides=overrides_of(run.overrides))
    with store_home.explained(home):
        write_whole(nights.folder_of(home, run.id) / nights.RECORD, msgspec.json.encode(run), durable=True)


def read(home: Path, run_id: str) -> RunRecord:
    """Read a run's record; raises `StoreDamaged`."""
    path = nights.folder_of(home, run_id) / nights.RECORD
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunRecord)
    except (OSError, msgspec.MsgspecError) as error:
        raise StoreDamaged(f"the record {path} cannot be read ({error}); remove its folder") from error


def runs(home: Path, evaluation: str | None = None) -> list[RunRecord]:
    """All runs, or those of one evaluation, the oldest first; records that cannot be read are left out."""
    found = (readable(record) for record in nights.records(home))
    return [run for run in found if run is not None and evaluation in (None, run.evaluation)]


def readable(record: dict[str, Any]) -> RunRecord | None:
    """Record of a run; None for one that this version cannot read."""
    try:
        return msgspec.convert(record, RunRecord)
    except msgspec.ValidationError:
        return None


def unreadable(home: Path) -> list[Path]:
    """Folders of runs whose records cannot be read, which `runs` leaves out."""
    known = {run.id for run in runs(home)}
    return sorted(folder for folder in nights.runs_folder(home).glob("*/") if folder.name not in known)


def unfinished(home: Path, evaluation: str) -> RunRecord | None:
    """The run of an evaluation that was begun and has not ended; the newest of several."""
    left = [run for run in runs(home, evaluation) if run.state is RunState.RUNNING]
    return left[-1] if left else None


def resolve(home: Path, wanted: str, *, beside: RunRecord | None = None) -> RunRecord:
    """Run of this id, beginning of an id, or name; "last", and "last~2" for the second before it.

    "last" is the newest run that ended; those before it are of the same evaluation. "EVALUATION:last" is the newest
    of that evaluation. A run to compare with is of the evaluation of the run `beside` it; raises `UsageError` for
    one of another.
    """
    evaluation, word = parted(home, wanted)
    if beside is not None and evaluation not in (None, beside.evaluation):
        raise UsageError(
            f"{wanted} is of {evaluation!r} and {beside.id} of {beside.evaluation!r}; "
            "compare runs of one evaluation"
        )
    known = runs(home, evaluation if beside is None else beside.evaluation)
    ended = [run for run in known if run.state in (RunState.FINISHED, RunState.FAILED)]
    if not ended:
        of = "no evaluation" if evaluation is None else f"no run of {evaluation!r}"
        raise UsageError(f"{of} has ended yet; run: conserve eval run nightly.toml")
    newest, tilde, back = word.partition("~")
    if newest == "last" and (not tilde or (back.isascii() and back.isdigit())):
        mine = [run for run in ended if run.evaluation == ended[-1].evaluation]
        place = int(back or 0)
        if place >= len(mine):
            raise UsageError(
                f"{wanted} is no run: {ended[-1].evaluation!r} has {len(mine)}; run: conserve eval list"
            )
        return mine[-1 - place]
    marks = nights.names(home)
    exact = matching(known, marks, word)
    if beside is not None and not exact and (others := matching(runs(home), marks, word)):
        raise UsageError(
            f"{others[0].id} is of {others[0].evaluation!r} and {beside.id} of {beside.evaluation!r}; "
            "compare runs of one evaluation"
        )
    if len(exact) != 1 or not word:
        what = "is no run" if len(exact) < 2 else f"may be {exact[0].id} or {exact[1].id}"
        given = sorted({name for run in known for name in marks.get(run.id, ())})
        near = [] if exact else get_close_matches(wanted, ["last", *given], n=1)
        meant = "".join(f" (did you mean {one}?)" for one in near)
        first = wanted.isalpha() and not (exact or near or given)
        named = f", or name the last run: conserve eval name last {wanted}" if first else ""
        raise UsageError(f"{wanted!r} {what}{meant}; run: conserve eval list{named}")
    if beside is not None and exact[0].state in (RunState.RUNNING, RunState.GIVEN_UP):
        raise UsageError(f"{exact[0].id} has not ended; compare with a run that has: conserve eval list")
    return exact[0]


def parted(home: Path, wanted: str) -> tuple[str | None, str]:
    """Evaluation and run of "EVALUATION:RUN"; None and the whole of other text, as of a name with a colon."""
    evaluation, colon, word = wanted.partition(":")
    if not colon or any(wanted in names for names in nights.names(home).values()):
        return None, wanted
    return (evaluation, word) if runs(home, evaluation) else (None, wanted)


def named(home: Path, wanted: str, *, beside: RunRecord) -> RunRecord | None:
    """Run of the same evaluation that this stands for, as `resolve` takes it; None if there is none."""
    try:
        return resolve(home, wanted, beside=beside)
    except UsageError:
        return None


def matching(
    known: Sequence[RunRecord], marks: Mapping[str, Collection[str]], wanted: str
) -> list[RunRecord]:
    """Runs of this name, else of this id, else of this beginning of an id."""
    return (
        [run for run in known if wanted in marks.get(run.id, ())]
        or [run for run in known if run.id == wanted]
        or [run for run in known if run.id.startswith(wanted)]
    )


def begun_since(home: Path, run: RunRecord) -> RunRecord | None:
    """The run of the same evaluation that began after this one and has not ended."""
    left = unfinished(home, run.evaluation)
    return left if left is not None and left.began_at > run.began_at else None


def previous(home: Path, run: RunRecord) -> RunRecord | None:
    """The run of the same evaluation that ended before this one began."""
    before = history(home, run)
    return before[-1] if before else None


def history(home: Path, run: RunRecord) -> list[RunRecord]:
    """Earlier runs of the same evaluation that ended, the oldest first.

    A trial with `--limit` is no night of the file's own sample: both are compared with their like alone.
    """
    return [
        one
        for one in runs(home, run.evaluation)
        if (one.began_at, one.id) < (run.began_at, run.id)
        and one.state in (RunState.FINISHED, RunState.FAILED)
        and one.overrides.get("limit") == run.overrides.get("limit")
    ]


def name(home: Path, run: RunRecord, given: str) -> None:
    """Give a run a name, which another run of its evaluation loses; raises `StoreReadOnly` in a backup."""
    store_home.refuse_backup(home)
    taken = given.rpartition(":")[2].partition("~")[0] in NAME_TAKEN
    if not given.isprintable() or not given.strip() or taken:
        raise UsageError(f"{given!r} cannot name a run; choose a word as baseline")
    if any(one.id == given for one in runs(home)):
        raise UsageError(f"{given!r} is the id of a run; choose a word as baseline")
    if run.state in (RunState.RUNNING, RunState.GIVEN_UP):
        raise UsageError(f"{run.id} has not ended, so there is nothing to compare with; name another run")
    marks = nights.names(home)
    for one in runs(home, run.evaluation):
        if given in marks.get(one.id, ()):
            marks[one.id].remove(given)
    marks.setdefault(run.id, []).append(given)
    with store_home.explained(home):
        write_whole(nights.names_file(home), json.dumps(marks).encode(), durable=True)


def names_of(home: Path, run: RunRecord) -> list[str]:
    """Names that users gave to a run."""
    return sorted(nights.names(home).get(run.id, ()))


def with_suite(run: RunRecord, suite: SuiteRecord) -> RunRecord:
    """Run with one more suite that has ended, in place of an earlier record of it."""
    return replace(run, suites=(*(one for one in run.suites if one.name != suite.name), suite))


def write_items(home: Path, run_id: str, file: str, suite: str, items: Iterable[Item]) -> Path:
    """Write a suite's items as they come; the file appears whole."""
    folder = nights.folder_of(home, run_id)
    path, partial = folder / file, folder / f".{file}"
    with store_home.explained(home):
        folder.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(partial, ITEMS, compression="zstd") as writer:
            for batch in batches(items):
                writer.write_table(table_of(suite, batch))
        sync(partial)
        partial.rename(path)
    return path


def batches(items: Iterable[Item]) -> Iterable[list[Item]]:
    """Items in lists of bounded length; one empty list where there are none."""
    batch: list[Item] = []
    for item in items:
        batch.append(item)
        if len(batch) == ROWS_AT_ONCE:
            yield batch
            batch = []
    yield batch


def table_of(suite: str, items: Sequence[Item]) -> pa.Table:
    """Items as a table."""
    rows = [
        {
            "suite": suite,
            "item": item.id,
            "epoch": item.epoch,
            "source": item.source,
            "prompt": item.prompt,
            "answer": item.answer,
            "expected": item.expected,
            "error": item.error,
            "prompt_tokens": item.prompt_tokens,
            "answer_tokens": item.answer_tokens,
            "scores": [(metric, float(score)) for metric, score in item.scores.items()],
        }
        for item in items
    ]
    return pa.Table.from_pylist(rows, schema=ITEMS)


def remove(home: Path, run: RunRecord) -> None:
    """Remove a run's files; its jobs stay."""
    shutil.rmtree(nights.folder_of(home, run.id), ignore_errors=True)


def outdated(home: Path, evaluation: str, *, before: float) -> list[RunRecord]:
    """Ended runs that began before this moment and have no name."""
    marks = nights.names(home)
    return [
        run
        for run in runs(home, evaluation)
        if run.began_at < before and run.state is not RunState.RUNNING and not marks.get(run.id)
    ]
