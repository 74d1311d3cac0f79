"""Runs in the store's folder: records that are whole or not there, files of items, names, and a lock.

Each ended suite is written at once, so that a killed run begins again with the first suite that has not ended.
"""

import json
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from conserve.config import refuse_backup
from conserve.errors import StoreDamaged, UsageError
from conserve.evals.outcome import Item
from conserve.evals.records import HISTORY, PREVIOUS, RunRecord, RunState, SuiteRecord
from conserve.nightly.redacted import overrides_of, plan_text_of
from conserve.store.files import nights, os_errors
from conserve.store.sql.eval_views import ITEMS
from conserve.whole import sync, write_whole

ROWS_AT_ONCE = 1000
NAME_TAKEN = ("last", PREVIOUS, HISTORY)
ENDED = (RunState.FINISHED, RunState.FAILED)

Marks = Mapping[str, Collection[str]]  # names that users gave, by run


def new_id(home: Path, evaluation: str, *, now: float) -> str:
    """Id of a new run: the evaluation's name and the local time; a number tells runs of one minute apart."""
    stem = f"{evaluation}-{datetime.fromtimestamp(now):%Y%m%d-%H%M}"
    known = {run.id for run in runs(home)}
    return next(one for n in range(1, 10_000) if (one := stem if n == 1 else f"{stem}-{n}") not in known)


def is_id(text: str, evaluation: str) -> bool:
    """True for a text that is made as ids of an evaluation's runs are (`new_id`), or the beginning of one."""
    return re.fullmatch(rf"{re.escape(evaluation)}-\d{{8}}[-\d]*", text) is not None


def write(home: Path, run: RunRecord) -> None:
    """Write a run's record, durably; that of a run which has ended, and needs no password any more, without any."""
    if run.state is not RunState.RUNNING:
        run = replace(run, plan=plan_text_of(run.plan), overrides=overrides_of(run.overrides))
    with os_errors.explained(home):
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
    return of_evaluation((run for run in found if run is not None), evaluation)


def of_evaluation(known: Iterable[RunRecord], evaluation: str | None) -> list[RunRecord]:
    """Runs of an evaluation; all of these where it is None."""
    return [run for run in known if evaluation in (None, run.evaluation)]


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


def unfinished_run(home: Path, evaluation: str) -> RunRecord | None:
    """The run of an evaluation that was begun and has not ended; the newest of several."""
    left = [run for run in runs(home, evaluation) if run.state is RunState.RUNNING]
    return left[-1] if left else None


class RunName(NamedTuple):
    """A run in a user's words: an id, its beginning, a name, "last" or "last~2"; its evaluation before a colon."""

    text: str
    evaluation: str | None
    word: str

    @classmethod
    def parse(cls, text: str, known: Sequence[RunRecord], marks: Marks) -> "RunName":
        """Parse a text. Its colon is part of a name that a run has, or where no evaluation stands before it."""
        evaluation, colon, word = text.partition(":")
        is_given = any(text in names for names in marks.values())
        if colon and not is_given and any(run.evaluation == evaluation for run in known):
            return cls(text, evaluation, word)
        return cls(text, None, text)

    @property
    def back(self) -> int | None:
        """Number of runs back from the last; None of another word."""
        last = re.fullmatch(r"last(?:~([0-9]+))?", self.word)
        return None if last is None else int(last[1] or 0)

    def found(self, known: Sequence[RunRecord], marks: Marks) -> list[RunRecord]:
        """Runs among these that it stands for: none, one, or several if it says too little."""
        if self.back is None:
            return matching(known, marks, self.word) if self.word else []
        return latest(known)[::-1][self.back : self.back + 1]

    def error(self, known: Sequence[RunRecord], marks: Marks, found: Sequence[RunRecord]) -> UsageError:
        """The error where it stands for none of the known runs, or for those that were found, several."""
        if self.back is not None:
            mine = latest(known)
            said = f"{self.text} is no run: {mine[-1].evaluation!r} has {len(mine)}"
            return UsageError(f"{said}; run: conserve eval list")
        what = f"may be {found[0].id} or {found[1].id}" if found else "is no run"
        given = sorted({one for run in known for one in marks.get(run.id, ())})
        near = [] if found else get_close_matches(self.text, ["last", *given], n=1)
        meant = "".join(f" (did you mean {one}?)" for one in near)
        is_first = self.text.isalpha() and not (found or near or given)
        give = f", or name the last run: conserve eval name last {self.text}" if is_first else ""
        return UsageError(f"{self.text!r} {what}{meant}; run: conserve eval list{give}")


def latest(known: Sequence[RunRecord]) -> list[RunRecord]:
    """Runs that ended, of the evaluation of the newest of them, the oldest first."""
    ended = [run for run in known if run.state in ENDED]
    return [run for run in ended if run.evaluation == ended[-1].evaluation]


def resolve(home: Path, wanted: str, *, beside: RunRecord | None = None) -> RunRecord:
    """Run that a user's words stand for (`RunName`); raises `UsageError` unless it is one.

    "last" is the newest run that ended; those before it are of the same evaluation. A run to compare with is one
    that ended, of the evaluation of the run `beside` it.
    """
    every, marks = runs(home), nights.names(home)
    name = RunName.parse(wanted, every, marks)
    if beside is not None and name.evaluation not in (None, beside.evaluation):
        raise of_two(wanted, name.evaluation, beside)
    evaluation = name.evaluation if beside is None else beside.evaluation
    known = of_evaluation(every, evaluation)
    if not latest(known):
        of = "no evaluation" if evaluation is None else f"no run of {evaluation!r}"
        raise UsageError(f"{of} has ended yet; run: conserve eval run nightly.toml")
    found = name.found(known, marks)
    if beside is not None and not found and name.back is None and (others := name.found(every, marks)):
        raise of_two(others[0].id, others[0].evaluation, beside)
    if len(found) != 1:
        raise name.error(known, marks, found)
    if beside is not None and found[0].state not in ENDED:
        raise UsageError(f"{found[0].id} has not ended; compare with a run that has: conserve eval list")
    return found[0]


def of_two(wanted: str, evaluation: str | None, beside: RunRecord) -> UsageError:
    """The error for a run to compare with that is of another evaluation."""
    return UsageError(
        f"{wanted} is of {evaluation!r} and {beside.id} of {beside.evaluation!r}; compare runs of one evaluation"
    )


def resolve_or_none(home: Path, wanted: str, *, beside: RunRecord) -> RunRecord | None:
    """Run of the same evaluation that this stands for, as `resolve` takes it; None if there is none."""
    try:
        return resolve(home, wanted, beside=beside)
    except UsageError:
        return None


def matching(known: Sequence[RunRecord], marks: Marks, wanted: str) -> list[RunRecord]:
    """Runs of this name, else of this id, else of this beginning of an id."""
    return (
        [run for run in known if wanted in marks.get(run.id, ())]
        or [run for run in known if run.id == wanted]
        or [run for run in known if run.id.startswith(wanted)]
    )


def under_way(home: Path, wanted: str) -> RunRecord | None:
    """The night that "last" passes over, since it has not ended; None of other words."""
    every = runs(home)
    name = RunName.parse(wanted, every, nights.names(home))
    if name.back != 0:
        return None
    known = of_evaluation(every, name.evaluation)
    if ended := latest(known):
        known = of_evaluation(known, ended[-1].evaluation)
    begun = [run for run in known if run.state is not RunState.GIVEN_UP]
    return begun[-1] if begun and begun[-1].state is RunState.RUNNING else None


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
        and one.state in ENDED
        and one.overrides.get("limit") == run.overrides.get("limit")
    ]


def name(home: Path, run: RunRecord, given: str) -> None:
    """Give a run a name, which another run of its evaluation loses; raises `StoreReadOnly` in a backup."""
    refuse_backup(home)
    taken = given.rpartition(":")[2].partition("~")[0] in NAME_TAKEN
    if not given.isprintable() or not given.strip() or taken:
        raise UsageError(f"{given!r} cannot name a run; choose a word as baseline")
    if any(one.id == given for one in runs(home)):
        raise UsageError(f"{given!r} is the id of a run; choose a word as baseline")
    if run.state not in ENDED:
        raise UsageError(f"{run.id} has not ended, so there is nothing to compare with; name another run")
    marks = nights.names(home)
    for one in runs(home, run.evaluation):
        if given in marks.get(one.id, ()):
            marks[one.id].remove(given)
    marks.setdefault(run.id, []).append(given)
    with os_errors.explained(home):
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
    with os_errors.explained(home):
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


def outdated_runs(home: Path, evaluation: str, *, before: float) -> list[RunRecord]:
    """Ended runs that began before this moment and have no name."""
    marks = nights.names(home)
    return [
        run
        for run in runs(home, evaluation)
        if run.began_at < before and run.state is not RunState.RUNNING and not marks.get(run.id)
    ]
