"""Inputs and answers of batches: two processes at one store, and files that cannot be read at one moment."""

import asyncio
import errno
import json
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import duckdb
import pytest
from sqlalchemy import text

from conserve.batch_api.moved import MoveWatch
from conserve.batch_api.objects import batch_object
from conserve.batch_api.workers import Deliveries, StepThread
from conserve.config import load
from conserve.endpoints.fake import FakeEndpoint
from conserve.errors import InputError, StoreError
from conserve.jobs.batches import admission, delivery
from conserve.jobs.batches.admission import admit
from conserve.jobs.batches.delivery import deliver
from conserve.jobs.batches.lines import Limits
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.task import Kind, Order, Task
from conserve.store.books import batches, catalog, shards, uploads
from conserve.store.books.batch_state import BatchState
from conserve.store.books.batches import BatchRecord, NewBatch
from conserve.store.books.readings import read_jobs
from conserve.store.books.states import OnLate
from conserve.store.books.uploads import NewFile
from conserve.store.database.moves import MoveState
from conserve.store.database.store import Store
from conserve.store.files import digests, layout
from conserve.store.files.folder_place import FolderPlace
from conserve.store.files.objects import below
from tests.batch_rig import CHAT, client, compute, create, lines, live, reaches
from tests.commands import HANGS_S, conserve, until
from tests.store_rows import LEASE_S, add_job, add_mark, finish, leased
from tests.tiers import in_full


@pytest.fixture
def ended(store: Store, tmp_path: Path) -> BatchRecord:
    """A batch whose job has ended, without its files."""
    (tmp_path / "rows.jsonl").write_bytes(lines(["one", "two"]))
    assert conserve("submit", str(tmp_path / "rows.jsonl")).returncode == 0
    compute(store)
    return only_batch(store)


def only_batch(store: Store) -> BatchRecord:
    with store.read() as tx:
        (found,) = batches.page(tx, "default", before=None, limit=2)
    return found


def delivered(store: Store, batch: BatchRecord) -> list[str]:
    assert batch.job is not None
    return [
        path.stem for path in (layout.job_folder(store.home, batch.job.id) / uploads.DELIVERIES).iterdir()
    ]


def test_the_second_of_two_deliveries_leaves_the_files_of_the_first(store: Store, ended: BatchRecord) -> None:
    deliver(store, ended.id, now=1.0)
    with store.write() as tx:
        assert not batches.deliver(tx, ended, output="file-other", errors=None, now=2.0)
    found = only_batch(store)
    assert delivered(store, found) == [found.output_file_id]


def test_a_delivery_names_its_files_and_sweeps_up_those_of_one_that_was_killed(
    store: Store, ended: BatchRecord
) -> None:
    assert ended.job is not None
    folder = layout.job_folder(store.home, ended.job.id) / uploads.DELIVERIES
    folder.mkdir()
    (folder / "file-of-a-killed-process.jsonl").write_bytes(b"{}")
    deliver(store, ended.id, now=5.0)
    found = only_batch(store)
    assert delivered(store, found) == [found.output_file_id]
    with store.read() as tx:
        file = uploads.get(tx, "default", found.output_file_id or "", now=5.0)
    assert file is not None
    assert (file.purpose, file.filename) == ("batch_output", f"{found.id}_output.jsonl")
    content = (store.home / file.path).read_bytes()
    assert (file.bytes, file.num_lines) == (len(content), content.count(b"\n"))
    assert file.digest == blake2b(content, digest_size=16).hexdigest()
    assert (file.created_at, file.expires_at, file.job_id) == (5.0, None, ended.job.id)


def asked(store: Store, content: bytes, *, project: str = "default", **named: Any) -> str:
    """A batch that waits for its job, with its upload."""
    file_id = uploads.new_file_id()
    path = uploads.make_folder(store) / f"{file_id}.jsonl"
    path.write_bytes(content)
    upload = NewFile(
        purpose="batch", filename="Night Shift.v2.jsonl", bytes=len(content), num_lines=1, digest="",
        path=below(path, store.data), expires_at=named.pop("expires_at", None),
    )  # fmt: skip
    values = {"endpoint": CHAT, "completion_window": "24h", "window_s": 60.0, **named}
    with store.write() as tx:
        uploads.add(tx, project, file_id, upload, now=5.0)
        return batches.add(tx, project, NewBatch(file_id=file_id, **values), now=5.0)


def batch(store: Store, batch_id: str) -> BatchRecord:
    with store.read() as tx:
        found = batches.anywhere(tx, batch_id)
    assert found is not None
    return found


@pytest.mark.parametrize("project", ["default", "ann"])
@pytest.mark.parametrize("window_s", [60.0, None])
def test_the_job_of_a_batch_has_its_name_its_tags_and_its_deadline(
    store: Store, project: str, window_s: float | None
) -> None:
    batch_id = asked(
        store, lines(["one", "two"]), project=project, window_s=window_s, on_late=OnLate.BEST_EFFORT
    )
    admit(store, batch_id, Limits(), now=9.0)
    job = batch(store, batch_id).job
    assert job is not None
    assert (job.id.rpartition("-")[0], job.num_rows) == ("night-shift", 2)
    assert job.tags == {"batch": batch_id} | ({} if project == "default" else {"project": project})
    assert (job.deadline, job.on_late) == (None if window_s is None else 65.0, "best-effort")
    task = Task.from_json(job.task)
    assert (task.kind, task.url, task.order) == (Kind.OPENAI, CHAT, Order.PREFIX)


@pytest.mark.parametrize("way", ["expired", "deleted", "lost"])
def test_a_batch_whose_input_is_gone_fails(store: Store, way: str) -> None:
    batch_id = asked(store, lines(["one"]), expires_at=8.0 if way == "expired" else None)
    (path,) = uploads.folder(store).iterdir()
    if way == "deleted":
        with store.read() as tx:
            (upload,) = uploads.page(tx, "default", now=5.0, limit=2)
        uploads.remove(store, upload)
    elif way == "lost":
        path.unlink()
    admit(store, batch_id, Limits(), now=9.0)
    found = batch(store, batch_id)
    assert (found.state, found.job) == (BatchState.FAILED, None)
    (fault,) = found.errors
    assert (fault.code, fault.param) == ("invalid_input_file", "input_file_id")
    assert "upload it again" in fault.message


def test_faults_of_an_input_are_kept_with_the_moment(store: Store) -> None:
    batch_id = asked(store, lines(["one", "two"]))
    admit(store, batch_id, Limits(requests=1), now=9.0)
    found = batch(store, batch_id)
    assert ([fault.code for fault in found.errors], found.refused_at) == (["too_many_requests"], 9.0)


@pytest.mark.parametrize("moment", ["before", "waiting for the file", "queueing"])
def test_a_batch_that_is_cancelled_meanwhile_gets_no_job(
    store: Store, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    batch_id = asked(store, lines(["one"]))

    def cancelled(then: Callable[..., Any]) -> Callable[..., Any]:
        def first(*arguments: Any, **named: Any) -> Any:
            with store.write() as tx:
                batches.cancel(tx, batch(store, batch_id), now=6.0)
            return then(*arguments, **named)

        return first

    if moment == "before":
        cancelled(lambda: None)()
    else:
        owner, name = (FolderPlace, "alone") if moment == "waiting for the file" else (admission, "submit")
        monkeypatch.setattr(owner, name, cancelled(getattr(owner, name)))
    admit(store, batch_id, Limits(), now=9.0)
    assert (batch(store, batch_id).state, batch(store, batch_id).job) == (BatchState.CANCELLED, None)
    assert read_jobs(load(), now=9.0) == []


def test_files_that_are_not_wanted_any_more_are_deleted(
    store: Store, ended: BatchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "deliver", lambda *_, **__: False)
    deliver(store, ended.id, now=1.0)
    assert delivered(store, ended) == []
    assert only_batch(store).output_file_id is None
    with store.read() as tx:
        assert uploads.page(tx, "default", now=1.0, limit=9) == []


def test_a_batch_that_runs_or_has_no_job_has_nothing_to_deliver(store: Store) -> None:
    waiting, running = asked(store, lines(["one"])), asked(store, lines(["one"]))
    admit(store, running, Limits(), now=9.0)
    for batch_id in (waiting, running, "batch_none"):
        deliver(store, batch_id, now=10.0)
    assert (batch(store, waiting).state, batch(store, running).state) == (
        BatchState.VALIDATING,
        BatchState.IN_PROGRESS,
    )


@pytest.mark.parametrize("verb", ["cancel", "expire"])
def test_the_files_of_a_batch_that_ended_early_have_what_it_has(store: Store, verb: str) -> None:
    """The row in flight may bring no result afterwards. A deadline makes errors of the rows that it leaves."""
    batch_id = asked(store, lines(["one", "REJECT", "three"]), output_expires_s=3600.0)
    admit(store, batch_id, Limits(), now=9.0)
    job = batch(store, batch_id).job
    assert job is not None
    lease = leased(store, now=10.0)
    finish(store, lease, of=[0])
    with store.write() as tx:
        if verb == "cancel":
            batches.cancel(tx, batch(store, batch_id), now=20.0)
        else:
            assert catalog.expire(tx, now=100.0) == [job.id]
    deliver(store, batch_id, now=200.0)
    assert len(finish(store, lease, of=[1]).late) == 1
    found = batch(store, batch_id)
    names = {
        file.filename: ((store.home / file.path).read_bytes().count(b"\n"), file.num_lines, file.expires_at)
        for file in files(store)
    }
    expected = {f"{found.id}_output.jsonl": (1, 1, 3800.0)}
    if verb == "expire":
        expected[f"{found.id}_error.jsonl"] = (2, 2, 3800.0)
    assert names == expected
    assert (found.error_file_id is None) is (verb == "cancel")


def files(store: Store) -> list[uploads.File]:
    """Files of answers and of errors."""
    with store.read() as tx:
        return uploads.page(tx, "default", now=200.0, limit=9, purpose=delivery.PURPOSE)


def test_lines_that_no_engine_takes_fail_alone_also_where_all_are_such(store: Store) -> None:
    """One fault of the file would name the first line alone, and no custom_id."""
    lines = [
        {"custom_id": name, "method": "POST", "url": CHAT, "body": {"messages": [], "n": 0}} for name in "ab"
    ]
    with live(store) as url:
        openai = client(url)
        content = "\n".join(map(json.dumps, lines)).encode()
        file = openai.files.create(file=("rows.jsonl", content), purpose="batch")
        with store.write() as tx:
            new = NewBatch(file_id=file.id, endpoint=CHAT, completion_window="24h", window_s=1e12)
            batch_id = batches.add(tx, "default", new, now=0.0)
        admit(store, batch_id, Limits(), now=0.0)
    tally = asyncio.run(Harvester(store, FakeEndpoint()).run(asyncio.Event()))
    assert (tally.succeeded, tally.failed) == (0, 2)
    deliver(store, batch_id, now=1.0)
    found = batch(store, batch_id)
    assert (found.state, found.output_file_id) == (BatchState.COMPLETED, None)
    (errors,) = files(store)
    said = [json.loads(line) for line in (store.home / errors.path).read_text().splitlines()]
    assert [line["custom_id"] for line in said] == ["a", "b"]
    assert all("it has no messages" in line["error"]["message"] for line in said)


def test_a_delivery_that_waited_for_another_writes_nothing(
    store: Store, ended: BatchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = FolderPlace.alone

    def after_another(place: FolderPlace) -> object:
        monkeypatch.setattr(FolderPlace, "alone", alone)
        deliver(store, ended.id, now=1.0)
        return alone(place)

    monkeypatch.setattr(FolderPlace, "alone", after_another)
    deliver(store, ended.id, now=2.0)
    found = only_batch(store)
    assert found.delivered_at == 1.0
    assert delivered(store, found) == [found.output_file_id]


def test_answers_that_cannot_be_read_just_now_are_delivered_whole_later(
    store: Store, ended: BatchRecord
) -> None:
    assert ended.job is not None
    folder = layout.job_folder(store.home, ended.job.id)
    (shard,) = (folder / layout.RESULTS).glob("*.parquet")
    shard.rename(folder / "away")
    with pytest.raises(StoreError, match="are not written"):
        deliver(store, ended.id, now=1.0)
    assert only_batch(store).state is BatchState.FINALIZING
    assert delivered(store, ended) == []
    (folder / "away").rename(shard)
    deliver(store, ended.id, now=2.0)
    found = only_batch(store)
    assert found.state is BatchState.COMPLETED
    assert delivered(store, found) == [found.output_file_id]


def test_a_batch_that_cannot_be_delivered_is_tried_ever_more_rarely_and_holds_up_no_other(
    store: Store, ended: BatchRecord, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert ended.job is not None
    assert conserve("submit", str(tmp_path / "rows.jsonl")).returncode == 0
    layout.job_folder(store.home, ended.job.id).rename(tmp_path / "away")
    compute(store)
    with store.read() as tx:
        other, _ = batches.page(tx, "default", before=None, limit=2)
    deliveries = Deliveries(store)
    for one in (ended, other):
        deliveries.ask(one.id)
    for now in (0.0, 1.0, 2.0, 3.0, 5.0, 6.0):
        deliveries.step(now)
    said = [record.message for record in caplog.records if "is gone; run: conserve check" in record.message]
    assert len(said) == 3, "at 0, 2 and 6 s"
    with store.read() as tx:
        found = batches.anywhere(tx, other.id)
    assert found is not None
    assert found.state is BatchState.COMPLETED


def test_a_damaged_record_of_a_job_hides_no_other_batch(store: Store, ended: BatchRecord) -> None:
    add_job(store)
    with store.write() as tx:
        batches.of_submitted(tx, "job-1", now=0.0)
        tx.execute(text("update job set source = 'no JSON' where id = 'job-1'"))
    with store.read() as tx:
        found = batches.page(tx, "default", before=None, limit=9)
    assert [batch.state for batch in found] == [BatchState.IN_PROGRESS, BatchState.FINALIZING]
    assert all(map(batch_object, found))


def test_a_delivery_compares_the_files_of_answers_alone_with_their_digests(store: Store) -> None:
    batch_id = asked(store, lines(["one"]))
    admit(store, batch_id, Limits(), now=9.0)
    finish(store, leased(store, now=10.0))
    job = batch(store, batch_id).job
    assert job is not None
    shards.compact(store, job.id, now=11.0)
    compared = Mock(wraps=digests.digest_of)
    with patch.object(digests, "digest_of", compared):
        deliver(store, batch_id, now=20.0)
    assert [Path(call.args[0]).parent.name for call in compared.call_args_list] == ["results"]


def test_batches_that_were_asked_for_are_forgotten_once_they_have_ended(
    store: Store, ended: BatchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have been first, or the batch is gone; one whose rows are in flight waits for them."""
    busy = asked(store, lines(["one"]))
    admit(store, busy, Limits(), now=9.0)
    leased(store, now=10.0)
    with store.write() as tx:
        batches.cancel(tx, batch(store, busy), now=11.0)
    wanted: list[list[str]] = []
    deliverable = batches.deliverable

    def noted(tx: Any, *, asked: list[str], now: float) -> list[str]:
        wanted.append(asked)
        return deliverable(tx, asked=asked, now=now)

    monkeypatch.setattr(batches, "deliverable", noted)
    deliveries = Deliveries(store)
    for batch_id in (busy, ended.id, "batch_removed"):
        deliveries.ask(batch_id)
    deliver(store, ended.id, now=12.0)
    for now in (13.0, 14.0, 11.0 + LEASE_S, 12.0 + LEASE_S):
        deliveries.step(now)
    assert wanted == [[busy, ended.id, "batch_removed"], [busy], [busy], []]
    assert batch(store, busy).state is BatchState.CANCELLED


def test_a_store_that_is_elsewhere_is_left_alone_and_goes_on_once_it_is_back(
    store: Store, ended: BatchRecord, caplog: pytest.LogCaptureFixture
) -> None:
    moves, gone = MoveWatch(store), list[str]()
    moves.on_gone = lambda: gone.append(str(moves.moved))
    deliveries = Deliveries(store, moves)
    deliveries.ask(ended.id)
    for state, said in (
        (MoveState.LEAVING, "this store is being moved to there"),
        (MoveState.LEFT, "this store was moved to there"),
        (MoveState.ARRIVING, "this store is being filled from there"),
    ):
        add_mark(store, state)
        for now in (1.0, 2.0):
            deliveries.step(now)
            assert str(moves.moved).startswith(said)
        assert only_batch(store).state is BatchState.FINALIZING
    assert gone == ["this store was moved to there; set CONSERVE_STORE to that address"]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    add_mark(store, None)
    deliveries.step(3.0)
    assert (moves.moved, only_batch(store).state) == (None, BatchState.COMPLETED)


def test_a_worker_outlives_a_fault_of_its_step(caplog: pytest.LogCaptureFixture) -> None:
    steps: list[float] = []

    def step(now: float) -> None:
        steps.append(now)
        if len(steps) == 1:
            raise LookupError("a fault of the program")

    worker = StepThread("faulty", step)
    worker.start()
    until(lambda: "a step of faulty failed" in caplog.text)
    worker.wake()
    until(lambda: len(steps) > 1)
    worker.stop(within_s=HANGS_S)


def unreadable() -> Exception:
    """The error of a submit that could not read its input."""
    error = InputError("cannot read it")
    error.__cause__ = OSError(errno.EIO, "input/output error")
    return error


@pytest.mark.parametrize(
    "error",
    [
        unreadable(),
        *in_full(
            OSError(errno.EMFILE, "too many open files"),
            duckdb.OutOfMemoryException(""),
            MemoryError("malloc"),
        ),
    ],
)
def test_an_input_that_cannot_be_read_just_now_is_no_bad_input(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    with live(store) as url:
        with monkeypatch.context() as patch:
            patch.setattr(admission, "submit", fails)
            batch = create(client(url), ["one"])
            with pytest.raises(StoreError):
                admit(store, batch.id, Limits(), now=0.0)
            assert client(url).batches.retrieve(batch.id).status == "validating"
        assert reaches(client(url), batch.id, "in_progress")


def test_an_input_on_a_disk_that_is_not_there_is_waited_for(store: Store, tmp_path: Path) -> None:
    with live(store) as url:
        file = client(url).files.create(file=("a.jsonl", lines(["one"])), purpose="batch")
    away = uploads.folder(store).rename(tmp_path / "away")
    with store.write() as tx:
        new = NewBatch(file_id=file.id, endpoint=CHAT, completion_window="24h", window_s=1.0)
        batch_id = batches.add(tx, "default", new, now=0.0)
    with pytest.raises(StoreError, match="cannot be read now"):
        admit(store, batch_id, Limits(), now=0.0)
    away.rename(uploads.folder(store))
    admit(store, batch_id, Limits(), now=0.0)
    with store.read() as tx:
        found = batches.anywhere(tx, batch_id)
    assert found is not None
    assert found.state is BatchState.IN_PROGRESS
