"""The store as a harvester sees it: what it claims, records, and takes back from the dead."""

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve.errors import (
    JobNotFound,
    StoreDamaged,
    StoreError,
    StoreForbidden,
    StoreFull,
    StoreInUse,
    StoreUnreachable,
)
from conserve.jobs.deadlines.slack import SHARE, is_others_turn
from conserve.jobs.harvest import comparing, turned_away, workload
from conserve.jobs.harvest import ledger as ledger_module
from conserve.jobs.harvest.observer import Observer
from conserve.jobs.harvest.recorder import Recorder
from conserve.jobs.harvest.release import Release
from conserve.jobs.harvest.retry import RetryDecision
from conserve.jobs.harvest.tally import Tally
from conserve.jobs.harvest.turns import Turns
from conserve.jobs.harvest.workload import ReadyRow
from conserve.jobs.harvest.write_behind import Outcomes
from conserve.jobs.inputs import fingerprint as fingerprints
from conserve.jobs.inputs.keeping import Keep
from conserve.jobs.inputs.source import Input
from conserve.jobs.task import Kind, Task
from conserve.jobs.window.lookahead import Lookahead
from conserve.jobs.window.shares import Group
from conserve.store.books import (
    catalog,
    choice,
    harvested,
    journal,
    leases,
    queue,
    saved_tokens,
    servers,
    shards,
)
from conserve.store.books.job_terms import JobTerms
from conserve.store.books.journal import Finished
from conserve.store.books.leases import Lease
from conserve.store.books.results import encode
from conserve.store.books.saved_tokens import SavedTokens
from conserve.store.books.servers import Sighting
from conserve.store.books.states import FailedBy, JobState
from conserve.store.database.store import Store
from conserve.store.database.store_file import StoreFile
from conserve.store.files import digests, layout
from conserve.store.files.digests import Memory
from conserve.store.files.folder_place import FolderPlace
from conserve.store.files.marks import Mark
from conserve.store.files.place import place_of
from conserve.store.upkeep.sweep import STALE_AFTER_S
from tests.commands import HANGS_S, conserve, until
from tests.conftest import WriteInput
from tests.ledgers import ledger_of
from tests.store_rows import (
    add_job,
    claim,
    job,
    leased,
    live,
    of_another_boot,
    positions,
    put_back,
    result,
    select,
)
from tests.submitting import submit

TASK = Task(kind=Kind.PROMPT, template="{{ q }}")
LEASE_S = 60.0


class Clock:
    """Seconds since the epoch, moved by the test."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Party:
    """A harvester's half that deals with the store."""

    def __init__(self, store: Store, share: str | None = None) -> None:
        self.clock, self.tally = Clock(), Tally()
        self.ledger = ledger_of(
            store, self.tally, share=share, lease_s=LEASE_S, clock=self.clock, monotonic=self.clock
        )

    @property
    def refused(self) -> dict[str, str]:
        return {job_id: str(reason) for job_id, reason in self.tally.refused.items()}

    def claim(self, limit: int = 8, *, suspect: bool = False) -> list[ReadyRow]:
        return self.ledger.claim(limit, suspect, "model")

    def finish(self, *works: ReadyRow, failed: bool = False, **values: int) -> None:
        finished = [Finished(w.epoch, *w.key, result(w.row.position, failed=failed, **values)) for w in works]
        self.ledger.write(Outcomes(finished=finished))

    def put_back(self, *works: ReadyRow, **decision: object) -> None:
        returned = [(work, RetryDecision(**decision)) for work in works]  # type: ignore[arg-type]
        self.ledger.write(Outcomes(returned=returned))


@pytest.fixture
def party(store: Store) -> Iterator[Party]:
    party = Party(store)
    yield party
    party.ledger.close()


@pytest.fixture
def job_id(store: Store, write_input: WriteInput) -> str:
    given = Input(names=[str(write_input(q=["a", "b", "c", "d"]))], keep=Keep.REFERENCE)
    return submit(store, given, TASK).job_id


def row_numbers(works: list[ReadyRow]) -> list[int]:
    return [work.row.position for work in works]


def dead(owner: str) -> str:
    """Name of an earlier process of this boot that had the number of a process which lives."""
    host, pid, _, nonce = owner.rsplit(":", 3)
    return f"{host}:{pid}:0.00:{nonce}"


def test_claimed_rows_come_with_their_requests(party: Party, job_id: str) -> None:
    works = party.claim(3)
    assert row_numbers(works) == [0, 1, 2]
    assert [work.request.payload for work in works] == ["a", "b", "c"]
    assert [*party.tally.jobs] == [job_id]


def test_a_claim_that_found_nothing_looks_before_it_locks(store: Store, party: Party, job_id: str) -> None:
    """A claim only reads until there are rows that were never leased or whose time has come."""
    works = party.claim()
    assert party.claim() == []
    assert not party.ledger.claimable()
    party.put_back(works[1], after_s=5.0)
    assert not party.ledger.claimable()
    party.clock.now += 5.0
    assert party.ledger.claimable()
    assert row_numbers(party.claim()) == [1]
    assert party.claim() == []
    assert not party.ledger.claimable()
    with store.write() as tx:
        source = catalog.Source(path=None, format="jsonl")
        catalog.add(tx, "later", JobTerms(), task="{}", source=source, num_rows=1, now=0.0)
    assert party.ledger.claimable()


def test_many_jobs_with_rows_in_flight_have_few_files_open(
    store: Store, party: Party, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is opened again is compared again, by the memory that is read once."""
    monkeypatch.setattr(workload, "MOST_FILES", 2)
    jobs = [submit(store, str(write_input(f"{n}.parquet", q=["x", "y"])), TASK).job_id for n in range(5)]
    read, compared = counted(monkeypatch, Memory, "_read"), counted(monkeypatch, digests, "digest_of")
    party.clock.now = time.time() + digests.YOUNG_S + 1
    works = [work for _ in range(3) for work in party.claim(4)]
    assert sorted(work.key for work in works) == sorted((job_id, row) for job_id in jobs for row in range(2))
    assert all(work.request.row_index == work.row.position for work in works)
    assert len(party.ledger._workload._files) == 2
    assert sorted(party.ledger._workload.seen()) == sorted(jobs)
    assert (len(read), len(compared)) == (1, 5)
    with store.write() as tx:
        for job_id in jobs:
            catalog.move(tx, job_id, "pause", now=0.0)
    assert party.ledger.stopped_jobs() == set(jobs)
    assert party.ledger._workload._files == {}
    party.ledger.close()
    assert len(json.loads((store.home / digests.MEMORY).read_bytes())) == 5


def counted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[object]:
    """One object for each call of a function from now on."""
    calls, function = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: calls.append(given) or function(*given))
    return calls


@pytest.mark.parametrize(
    "where", ["conserve.jobs.requests.file.pq.ParquetFile", "conserve.store.files.digests.digest_of"]
)
def test_a_machine_that_opens_no_more_files_is_no_damage_of_a_job(
    store: Store, party: Party, job_id: str, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Nor is a folder of all jobs that is missing, as when a disk is not mounted."""
    codes = [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE]
    left: list[Exception] = [
        pa.ArrowMemoryError("malloc failed"),
        *(OSError(n, os.strerror(n)) for n in codes),
    ]

    def refused(*_: object, **__: object) -> None:
        raise left[0]

    with monkeypatch.context() as machine:
        machine.setattr(where, refused)
        while left:
            many = getattr(left[0], "errno", None) in (errno.EMFILE, errno.ENFILE)
            said = "ulimit -n" if many else "run the command again"
            with pytest.raises(StoreError, match=said):
                party.claim(1)
            party.ledger.give_back()
            left.pop(0)
    layout.jobs_folder(store.data).rename(store.data / "elsewhere")
    with pytest.raises(StoreError, match="check CONSERVE_HOME"):
        party.claim()
    assert (party.tally.refused, job(store, job_id).state) == ({}, JobState.QUEUED)


@pytest.mark.parametrize(("module", "name"), [(pq, "ParquetFile"), (digests, "digest_of")])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_job_whose_requests_this_machine_cannot_read_is_left_to_others(
    store: Store, party: Party, job_id: str, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch,
    module: ModuleType, name: str, number: int
) -> None:  # fmt: skip
    """The machine runs the other jobs, and tries the one again after a minute."""
    other = submit(store, str(write_input("other.parquet", q=["x"])), TASK).job_id
    read = getattr(module, name)

    def refused(path: object, **named: object) -> object:
        if job_id in str(path):
            raise OSError(number, os.strerror(number))
        return read(path, **named)

    with monkeypatch.context() as machine:
        machine.setattr(module, name, refused)
        (work,) = party.claim()
        assert (work.job_id, party.claim(), party.ledger.claimable()) == (other, [], False)
        party.finish(work)
        assert party.ledger.nothing_left()
        said = f"({os.strerror(number)}), which says nothing about what is in it; "
        assert said in party.refused[job_id]
        party.clock.now += turned_away.AGAIN_S
        assert party.claim() == []
        party.clock.now += turned_away.AGAIN_S
    assert (job(store, job_id).state, live(store, job_id)) == (JobState.QUEUED, dict.fromkeys(range(4)))
    assert len(party.claim()) == 4
    assert party.tally.refused == {}


def test_a_job_whose_folder_another_machine_may_have_is_left_to_it(
    store: Store, party: Party, job_id: str, write_input: WriteInput, database: str
) -> None:
    """The database may be that of several machines, of which each was given a folder of its own by mistake."""
    other = submit(store, str(write_input("other.parquet", q=["x"])), TASK).job_id
    folder = layout.job_folder(store.data, job_id)
    assert isinstance(folder, Path)
    folder.rename(store.data / "elsewhere")
    assert [work.job_id for work in party.claim()] == [other]
    if database == "sqlite":
        assert job(store, job_id).state is JobState.FAILED, "no other machine has it"
        return
    assert f"{folder} is missing; harvesters of one database" in party.refused[job_id]
    assert job(store, job_id).state is JobState.QUEUED
    (store.data / "elsewhere").rename(folder)
    party.clock.now += turned_away.AGAIN_S
    assert len(party.claim()) == 4
    assert party.tally.refused == {}


def test_a_job_that_another_harvester_ended_is_no_longer_told_of(
    store: Store, party: Party, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as machine:
        machine.setattr(workload, "RequestFile", Mock(side_effect=StoreForbidden("closed", job_id=job_id)))
        assert party.claim() == []
    assert party.refused == {job_id: "closed"}
    other = Party(store)
    other.finish(*other.claim())
    other.ledger.close()
    assert party.ledger.nothing_left()
    assert party.tally.refused == {}


@pytest.mark.parametrize(
    ("decision", "available_at", "failures", "deaths", "suspect", "retries"),
    [
        ({}, 0.0, 0, 0, False, 0),
        ({"after_s": 4.0, "is_failure": True}, 1004.0, 1, 0, False, 1),
        ({"suspect": True}, 0.0, 0, 0, True, 0),
        ({"suspect": True, "is_failure": True}, 0.0, 1, 1, True, 1),
    ],
)
def test_a_row_that_is_returned_waits_as_was_decided(
    store: Store,
    party: Party,
    job_id: str,
    decision: dict[str, object],
    available_at: float,
    failures: int,
    deaths: int,
    suspect: bool,
    retries: int,
) -> None:
    works = party.claim()
    party.put_back(works[1], **decision)
    columns = "epoch, available_at, failures, deaths, suspect"
    assert select(store, f"select {columns} from request where position = 1") == [
        (None, available_at, failures, deaths, suspect)
    ]
    assert job(store, job_id).retries == retries
    assert live(store, job_id) == {1: None} | dict.fromkeys((0, 2, 3), works[0].epoch)


def test_outcomes_of_all_kinds_are_written_at_once(store: Store, party: Party, job_id: str) -> None:
    """Tokens first, so that a row that is returned keeps them; the lease ends with its last row."""
    works = party.claim()
    saved = SavedTokens(works[0].epoch, *works[0].key, saved_tokens.pack_tokens([7]), "model")
    outcomes = Outcomes(
        finished=[Finished(works[1].epoch, *works[1].key, result(1))],
        returned=[(works[0], RetryDecision()), (works[2], RetryDecision())],
        saved={works[0].key: saved},
    )
    assert outcomes
    assert outcomes.epochs == {works[0].epoch: 3}
    party.ledger.write(outcomes)
    assert select(store, "select position, epoch, tokens_by from request order by 1") == [
        (0, None, "model"),
        (2, None, None),
    ]
    assert live(store, job_id) == {0: None, 2: None, 3: works[3].epoch}
    party.put_back(works[3])
    assert select(store, "select count(*) from lease") == [(0,)]
    (first, *_) = party.claim()
    assert first.call is not None
    assert list(first.call.resume_from) == [7]


@pytest.mark.parametrize("part", ["finished", "returned", "saved"])
def test_outcomes_are_empty_if_all_kinds_are(part: str) -> None:
    outcomes = Outcomes()
    assert not outcomes
    {"finished": outcomes.finished.append, "returned": outcomes.returned.append}.get(
        part,
        lambda _: outcomes.saved.update({("j", 1): None}),  # type: ignore[dict-item]
    )(None)  # type: ignore[arg-type]
    assert outcomes


def test_the_journal_is_emptied_by_the_shard_and_at_the_end(
    store: Store, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_ROWS", 2)
    recorder = Recorder(store, Clock())
    lease = leased(store)
    journalled = []
    for position in positions(lease):
        record(recorder, outcomes_of(lease, [position]))
        journalled.append(select(store, "select count(*) from journal")[0][0])
    assert journalled == [1, 0, 1, 0]
    assert select(store, "select num_rows, created_at from shard") == [(2, 1000.0), (2, 1000.0)]
    assert job(store, job_id).finished_at == 1000.0


def test_large_answers_of_a_job_fill_a_shard_by_their_bytes_while_it_runs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of each job are counted by themselves, from its last shard on."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 2 * len(encode(result(0))))
    recorder = Recorder(store, Clock())
    leases = {name: leased(store, only=[add_job(store, name, rows=6)]) for name in ("large", "other")}
    journalled = []
    for name, position in (("large", 0), ("other", 0), ("large", 1), ("large", 2), ("large", 3)):
        record(recorder, outcomes_of(leases[name], [position]))
        journalled.append(select(store, "select count(*) from journal")[0][0])
    assert journalled == [1, 2, 1, 2, 1]
    assert select(store, "select job_id, num_rows from shard") == [("large", 2), ("large", 2)]


@pytest.mark.parametrize("share", [None, "jobs"])
def test_results_are_counted_if_their_shard_cannot_be_written(
    store: Store, job_id: str, monkeypatch: pytest.MonkeyPatch, share: str | None
) -> None:
    """The disk of CONSERVE_DATA may be full, and that of the database not."""
    party = Party(store, share=share)
    works = party.claim()
    settled: list[Outcomes] = []
    monkeypatch.setattr(ledger_module, "settle", lambda _, outcomes: settled.append(outcomes))
    monkeypatch.setattr(shards, "compact", Mock(side_effect=StoreFull("no space left")))
    with pytest.raises(StoreFull):
        party.finish(*works)
    assert (party.tally.succeeded, [*party.tally.completed]) == (4, [job_id])
    assert len(settled) == (share is not None)
    party.ledger.close()


def test_results_of_several_harvesters_fill_a_shard_together(
    store: Store, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_ROWS", 2)
    recorders = [Recorder(store, Clock()) for _ in range(3)]
    lease = leased(store)
    journalled = []
    for recorder, position in zip(recorders, positions(lease), strict=False):
        record(recorder, outcomes_of(lease, [position]))
        journalled.append(select(store, "select count(*) from journal")[0][0])
    assert journalled == [1, 0, 1]


def test_less_than_a_shard_stays_until_the_job_is_complete(store: Store, job_id: str) -> None:
    recorder = Recorder(store, Clock())
    lease = leased(store)
    for these, left in (([0, 1, 2], 3), ([3], 0)):
        record(recorder, outcomes_of(lease, these))
        assert select(store, "select count(*) from journal") == [(left,)]


def test_shards_that_an_outage_kept_back_are_written_one_at_a_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the job runs, until fewer results are left than fill one: leases are renewed in between."""
    monkeypatch.setattr(shards, "SHARD_ROWS", 2)
    clock = Clock()
    recorder = Recorder(store, clock, monotonic=clock)
    add_job(store, rows=8)
    lease = leased(store)
    with monkeypatch.context() as away:
        away.setattr(shards, "compact_full", unreachable)
        for positions in ([0, 1], [2, 3], [4, 5, 6]):
            record(recorder, outcomes_of(lease, positions))
    clock.now += 30.0
    for left in (5, 3, 1, 1):
        record(recorder, Outcomes())
        assert select(store, "select count(*) from journal") == [(left,)]
    assert not recorder.behind


def unreachable(*_: Any, **__: Any) -> int:
    raise StoreUnreachable("the bucket is away")


def test_a_folder_that_may_not_be_written_holds_no_other_job_up(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That is said once; the results stay in the journal, and go to their file once the folder is mended."""
    made = FolderPlace.make

    def closed(folder: FolderPlace) -> None:
        if "theirs" in str(folder.path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        made(folder)

    monkeypatch.setattr(FolderPlace, "make", closed)
    clock = Clock()
    recorder = Recorder(store, clock, monotonic=clock)
    for name in ("theirs", "ours", "more"):
        add_job(store, name, rows=2)
        record(recorder, outcomes_of(leased(store, only=[name]), range(2)))
    while recorder.compact():
        pass
    assert select(store, "select distinct job_id from journal") == [("theirs",)]
    assert "run: sudo chown -R" in caplog.text
    recorder.recover()  # as a session begins
    assert not recorder.compact()
    assert recorder.behind
    monkeypatch.setattr(FolderPlace, "make", made)
    assert not recorder.compact()
    clock.now += 600.0
    assert recorder.compact()
    assert not recorder.compact()
    assert not recorder.behind
    assert select(store, "select count(*) from journal") == [(0,)]
    assert len(caplog.records) == 1


def record(recorder: Recorder, outcomes: Outcomes) -> None:
    """Write outcomes, and one shard where enough results have gathered, as the ledger does."""
    recorder.write(outcomes)
    recorder.compact()


def outcomes_of(lease: Lease, positions: Sequence[int]) -> Outcomes:
    """Answers to these rows."""
    return Outcomes(finished=[Finished(lease.epoch, lease.job_id, p, result(p)) for p in positions])


def test_a_completed_job_is_written_one_shard_at_a_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_ROWS", 2)
    recorder = Recorder(store, Clock())
    add_job(store, rows=5)
    record(recorder, outcomes_of(leased(store), range(5)))
    assert job(store).state is JobState.COMPLETED
    for left in (3, 1, 0):
        assert select(store, "select count(*) from journal") == [(left,)]
        assert recorder.compact() == (left > 0)
    assert not recorder.behind


def test_a_job_that_comes_back_before_its_last_shards_waits_for_full_ones(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_ROWS", 2)
    recorder = Recorder(store, Clock())
    add_job(store, rows=6)
    lease = leased(store)
    ends = [Finished(lease.epoch, "job-1", p, result(p, failed=p == 5)) for p in range(6)]
    record(recorder, Outcomes(finished=ends))
    shards.retry_failed(store, "job-1", now=0.0)
    assert recorder.compact()
    assert not recorder.compact()
    assert select(store, "select position from journal") == [(4,)]
    record(recorder, outcomes_of(leased(store), [5]))
    assert select(store, "select count(*) from journal") == [(0,)]


def test_the_queue_is_drained_when_nothing_is_leased_and_nothing_waits(
    store: Store, party: Party, job_id: str
) -> None:
    works = party.claim()
    assert not party.ledger.nothing_left()
    assert party.tally.waiting_for == "4 rows are with another conserve run"
    party.put_back(works[0], after_s=9.0)
    assert not party.ledger.nothing_left()
    assert party.tally.waiting_for == "1 row waits for its next attempt"
    party.clock.now += 9.0
    assert not party.ledger.nothing_left()
    assert party.tally.waiting_for == "3 rows are with another conserve run"
    party.finish(*works[1:3])
    assert not party.ledger.nothing_left()
    assert party.tally.waiting_for == "1 row is with another conserve run"
    party.finish(works[3], *party.claim())
    assert party.ledger.nothing_left()
    assert party.tally.waiting_for is None
    assert [*party.tally.completed] == [job_id]


def test_a_wait_ends_with_the_first_row_in_backoff(store: Store, party: Party, job_id: str) -> None:
    assert party.ledger.wait_s(2.0) == 2.0
    assert not party.ledger.nothing_left()
    assert party.tally.waiting_for == "no server takes rows"
    works = party.claim()
    party.put_back(works[0], after_s=1.5)
    party.put_back(works[1], after_s=5.0)
    assert party.claim() == []
    assert not party.ledger.claimable()
    assert [party.ledger.wait_s(most) for most in (1.0, 2.0)] == [1.0, 1.5]
    party.clock.now += 1.0
    assert party.ledger.wait_s(2.0) == 0.5


def test_a_job_that_was_removed_has_stopped_and_is_closed(
    store: Store, party: Party, write_input: WriteInput, job_id: str
) -> None:
    party.claim(1)
    with store.write() as tx:
        catalog.move(tx, job_id, "cancel", now=0.0)
    assert conserve("rm", job_id, "--yes").returncode == 0
    assert party.ledger.stopped_jobs() == {job_id}
    assert party.ledger._workload.seen() == [job_id], "rows claimed just before may still be in flight"
    assert party.ledger.stopped_jobs() == {job_id}
    assert party.ledger._workload.seen() == []
    assert party.ledger.stopped_jobs() == set()


def test_rows_of_the_dead_and_of_lost_leases_come_back_while_there_is_nothing_else(
    store: Store, party: Party, job_id: str
) -> None:
    """Waiting rows are looked for once a second only; an unrenewed lease ends after several looks."""
    claim(store, owner=dead(party.ledger.owner), now=1000.0, lease_s=900.0, limit=1)
    claim(store, owner="elsewhere:1:2:3", now=1000.0, lease_s=2.0, limit=1)
    claim(store, owner="elsewhere:1:2:4", now=1000.0, lease_s=900.0, limit=2)
    assert not party.ledger.nothing_left()
    assert len(select(store, "select * from lease")) == 2, "that of the dead has ended"
    for _ in range(2):
        party.clock.now += 0.9
        party.ledger.nothing_left()
        assert len(select(store, "select * from lease")) == 2
        party.clock.now += 0.1
    party.ledger.nothing_left()
    assert len(select(store, "select * from lease")) == 2
    party.clock.now += 1.0
    party.ledger.nothing_left()
    assert select(store, "select owner from lease") == [("elsewhere:1:2:4",)]
    assert row_numbers(party.claim()) == [0, 1]


def test_a_session_begins_with_what_the_last_one_left(store: Store, party: Party, job_id: str) -> None:
    """Rows of its own and of the dead come back, orphans are swept up; what is complete is compacted beside rows.

    A lease that ran out by the clock is watched first.
    """
    party.claim(1)
    claim(store, owner=dead(party.ledger.owner), now=1000.0, lease_s=900.0, limit=1)
    silent = leased(store, owner="elsewhere:1:2:3", now=900.0, limit=1)
    kept = leased(store, owner="elsewhere:1:2:4", now=1000.0, limit=1)
    add_job(store, "done", rows=1, priority=1)
    done = leased(store, owner="elsewhere:1:2:5", now=1000.0)
    with store.write() as tx:
        journal.commit(tx, [Finished(done.epoch, "done", 0, result(0))], now=0.0)
    orphan = layout.jobs_folder(store.home) / "orphan"
    orphan.mkdir()
    place_of(orphan).set_mark(Mark(store_id=store.id))
    party.clock.now = orphan.stat().st_mtime + STALE_AFTER_S + 1
    with store.write() as tx:
        leases.renew(tx, {kept.epoch}, now=party.clock.now, lease_s=60.0)
    party.ledger.reopen()
    party.ledger.recover()
    assert select(store, "select epoch from lease order by 1") == [(silent.epoch,), (kept.epoch,)]
    assert not orphan.exists()
    assert select(store, "select count(*) from journal") == [(1,)]
    assert party.ledger.recorder.behind
    party.ledger.recorder.compact()
    assert select(store, "select count(*) from journal") == [(0,)]


def released(store: Store, party: Party) -> None:
    """Release a store, whoever holds rows of it."""
    with suppress(StoreInUse), store.write() as tx:
        Release(lease_s=LEASE_S, monotonic=party.clock).require(tx)


@pytest.mark.parametrize(
    "look",
    [lambda _, party: party.ledger.recover(), lambda _, party: party.ledger.nothing_left(), released],
    ids=["at the start", "while idle", "of a move"],
)
def test_a_lease_of_another_boot_ends_at_once_where_the_store_is_of_one_machine(
    store: Store, party: Party, job_id: str, look: Callable[[Store, Party], object]
) -> None:
    """PostgreSQL is reached from other machines of this host's name, and one of them may be working."""
    leased(store, owner=of_another_boot(), lease_s=LEASE_S)
    look(store, party)
    of_one_machine = store.engine.dialect.name == "sqlite"
    assert select(store, "select count(*) from lease") == [(0 if of_one_machine else 1,)]


def fall_silent(party: Party) -> None:
    """Renew nothing, as of a claim whose answer was lost."""
    for _ in range(3):
        party.ledger.renew(set())
        party.clock.now += LEASE_S / 2


@pytest.mark.parametrize(
    "end", [lambda party: party.ledger.recover(), lambda party: party.ledger.give_back(), fall_silent]
)
def test_rows_of_a_harvester_that_lives_are_not_lost(
    store: Store, party: Party, job_id: str, end: Callable[[Party], object]
) -> None:
    """Only those lost with a dead harvester may become suspects."""
    for _ in range(5):
        assert row_numbers(party.claim()) == [0, 1, 2, 3]
        end(party)
    assert select(store, "select distinct losses, suspect from request") == [(None, False)]


def test_a_lease_of_another_boot_ends_by_its_silence(store: Store, party: Party, job_id: str) -> None:
    leased(store, owner=of_another_boot(), lease_s=LEASE_S)
    for _ in range(3):
        party.ledger.nothing_left()
        party.clock.now += LEASE_S / 2
    party.ledger.nothing_left()
    assert row_numbers(party.claim()) == [0, 1, 2, 3]


def test_a_session_forgets_figures_and_servers_of_long_ago(store: Store, party: Party) -> None:
    seen = Sighting(
        url="http://gone:8000", state="serving", model="m", version="1", alive=True, in_flight=0, waiting=0,
        tokens_per_s=1.0, why=None,
    )  # fmt: skip
    with store.write() as tx:
        for day in (0, 60):
            since = 1000.0 + day * 86_400
            harvested.note(tx, 100, since=since, now=since + 10.0)
        servers.note(tx, "elsewhere:1:2:3", [seen], now=1000.0)
    for days, slots, known in ((1, 2, 1), (8, 2, 0), (60, 1, 0)):
        party.clock.now = 1000.0 + days * 86_400
        party.ledger.recover()
        assert select(store, "select (select count(*) from harvested), (select count(*) from server)") == [
            (slots, known)
        ]


def test_what_is_not_done_at_the_end_waits_for_the_next_run(store: Store, party: Party, job_id: str) -> None:
    party.claim(2)
    other = leased(store, owner="elsewhere:1:2:3", limit=1)
    party.ledger.give_back()
    assert select(store, "select epoch from lease") == [(other.epoch,)]
    assert select(store, "select position from request where epoch is null order by 1") == [(0,), (1,)]


def test_a_lease_of_another_owner_that_has_the_same_epoch_is_left_alone(
    store: Store, party: Party, job_id: str
) -> None:
    """A standby that became the primary had not heard of ours, and gave its epoch again."""
    works = party.claim()
    epoch = works[0].epoch
    with store.write() as tx:
        tx.exec_driver_sql("update lease set owner = 'ben'")
    assert party.ledger.renew({epoch}) == set()
    party.put_back(works[0])
    saved = SavedTokens(epoch, job_id, 1, b"1234", "model")
    party.ledger.write(Outcomes(saved={works[1].key: saved}))
    party.finish(works[2])
    assert (party.tally.late, party.tally.done) == (1, 0)
    assert live(store, job_id) == dict.fromkeys(range(4), epoch)
    assert select(store, "select count(*) from request") == [(0,)]


def test_renewing_our_leases_ends_those_of_others_that_fell_silent(
    store: Store, party: Party, job_id: str
) -> None:
    (work,) = party.claim(1)
    lost = leased(store, owner="elsewhere:1:2:3", now=950.0, limit=1)
    for seconds in range(0, 30, 5):  # a lease of ten seconds; of a look that comes late, five of them count
        assert len(select(store, "select epoch from lease")) == (2 if seconds < 15 else 1)
        assert party.ledger.renew({work.epoch, 999}) == {work.epoch}
        party.clock.now += 5
    assert select(store, "select epoch, expires_at from lease") == [(work.epoch, 1085.0)]
    assert positions(lost) == [1]


def test_a_lease_of_our_own_that_is_not_known_here_ends_too(store: Store, party: Party, job_id: str) -> None:
    """A claim whose connection was cut before its answer leaves such a lease."""
    (work,) = party.claim(1)
    lost = leased(store, owner=party.ledger.owner, now=950.0, limit=1)
    for _ in range(4):
        assert party.ledger.renew({work.epoch}) == {work.epoch}
        party.clock.now += 5
    assert live(store, job_id) == {0: work.epoch, 1: None}
    assert positions(lost) == [1]


def test_jobs_that_stopped_are_named_as_long_as_they_do(store: Store, party: Party, job_id: str) -> None:
    party.claim(1)
    assert party.ledger.stopped_jobs() == set()
    for verb, stopped, cancelled in (
        ("pause", {job_id}, []),
        ("resume", set(), []),
        ("cancel", {job_id}, [job_id]),
    ):
        with store.write() as tx:
            catalog.move(tx, job_id, verb, now=0.0)
        assert party.ledger.stopped_jobs() == stopped
        assert [*party.tally.cancelled] == cancelled
    assert party.ledger.stopped_jobs() == {job_id}, "rows claimed just before may still be in flight"
    assert party.ledger.stopped_jobs() == set(), "it was closed"
    assert [*party.tally.cancelled] == [job_id]


def test_a_job_that_must_not_run_is_told_why_and_gives_its_rows_back(
    store: Store, party: Party, write_input: WriteInput, job_id: str
) -> None:
    whole = submit(store, str(write_input("other.parquet", q=["x"])), TASK, priority=-1).job_id
    write_input(q=["something else"])
    assert [work.job_id for work in party.claim()] == [whole]
    assert "changed after job" in party.refused[job_id]
    assert (job(store, job_id).state, job(store, job_id).failed_by) == (JobState.FAILED, FailedBy.INPUT)
    assert job(store, job_id).finished_at == 1000.0
    assert select(store, "select job_id from lease") == [(whole,)]


class SlowDigest:
    """Digests of one job's files, which take until the test lets them go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.taken: list[str] = []
        monkeypatch.setattr(comparing, "AT_ONCE_BYTES", 50_000)
        for module, name in ((digests, "digest_of"), (fingerprints, "fingerprint")):
            monkeypatch.setattr(module, name, partial(self._digest, getattr(module, name), named))

    def _digest(self, digest: Callable[[Path], object], named: str, path: Path) -> object:
        if named in str(path):
            self.taken.append(path.name)
            self.begun.set()
            assert self.go.wait(HANGS_S)
        return digest(path)


def large_job(store: Store, path: Path) -> str:
    """A job of 200 kB that goes before others."""
    return submit(store, Input(names=[str(path)], keep=Keep.REFERENCE), TASK, priority=1).job_id


@pytest.fixture
def large(write_input: WriteInput) -> Path:
    return write_input("large.parquet", q=[os.urandom(25_000).hex() for _ in range(4)])


@pytest.mark.parametrize("part", ["inputs", "requests"])
@pytest.mark.parametrize("others", [1, 2])
def test_a_job_waits_while_its_large_files_are_compared_and_others_run(
    store: Store, party: Party, large: Path, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch,
    part: str, others: int
) -> None:  # fmt: skip
    """The store's thread renews leases meanwhile. Each file is read once, an input for its time of change alone."""
    job_id = large_job(store, large)
    other = [submit(store, str(write_input(f"{n}.parquet", q=["x"])), TASK).job_id for n in range(others)]
    if part == "inputs":
        os.utime(large, (0, 0))
    slow = SlowDigest(monkeypatch, "large.parquet" if part == "inputs" else f"{job_id}/requests")
    works = [work for _ in range(others) for work in party.claim(1)]
    assert sorted(work.job_id for work in works) == sorted(other)
    assert slow.begun.wait(HANGS_S)
    party.finish(*works)
    assert (party.claim(), party.ledger.claimable(), party.ledger.nothing_left()) == ([], False, False)
    assert party.tally.waiting_for == "the files of 1 job are compared with their digests"
    assert party.ledger.wait_s(2.0) == 0.0
    assert (party.tally.refused, job(store, job_id).state) == ({}, JobState.QUEUED)
    assert live(store, job_id).keys() <= {0}
    assert select(store, "select * from lease") == []
    slow.go.set()
    kept: list[ReadyRow] = []
    until(lambda: len(kept) == 4 or bool(kept.extend(party.claim())))
    assert row_numbers(kept) == [0, 1, 2, 3]
    assert len(slow.taken) == 1


@pytest.mark.parametrize("part", ["inputs", "requests"])
def test_large_files_that_differ_are_found_beside_the_stores_thread(
    store: Store, party: Party, large: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    job_id = large_job(store, large)
    path = large if part == "inputs" else layout.requests_file(store.home, job_id)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    os.utime(path, (0, 0))
    SlowDigest(monkeypatch, path.name).go.set()
    until(lambda: party.claim() != [] or job_id in party.tally.refused)
    assert ("changed after" if part == "inputs" else "is not what was written") in str(
        party.tally.refused[job_id]
    )
    assert job(store, job_id).state is JobState.FAILED


def test_a_job_that_ends_while_its_files_are_compared_is_waited_for_no_more(
    store: Store, party: Party, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [large_job(store, large) for _ in range(2)]
    slow = SlowDigest(monkeypatch, "requests")
    assert party.claim() == []
    assert slow.begun.wait(HANGS_S)
    with store.write() as tx:
        for job_id in jobs:
            catalog.move(tx, job_id, "cancel", now=0.0)
    assert party.ledger.nothing_left()
    slow.go.set()


def test_a_job_whose_requests_break_while_rows_are_chosen_is_refused_alone(
    store: Store, party: Party, write_input: WriteInput, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = submit(store, str(write_input("other.parquet", q=["x"])), TASK).job_id
    errors = [JobNotFound("removed meanwhile"), StoreDamaged("row group 0 is damaged", job_id=job_id)]
    take = Lookahead.take

    def broken(window: Lookahead, limit: int) -> object:
        if errors:
            raise errors.pop(0)
        return take(window, limit)

    monkeypatch.setattr(Lookahead, "take", broken)
    assert [work.job_id for work in party.claim()] == [other]
    assert party.refused == {job_id: "row group 0 is damaged"}
    assert party.ledger._workload.seen() == [other], "once it is mended, it is opened anew"
    assert (job(store, job_id).state, job(store, job_id).failed_by) == (JobState.FAILED, FailedBy.DAMAGE)


def test_rows_of_two_jobs_that_begin_alike_are_claimed_one_after_the_other(
    store: Store, party: Party, write_input: WriteInput
) -> None:
    for number in range(2):
        prompts = [letter * 200 + str(number) for letter in "abc"]
        submit(store, str(write_input(f"{number}.parquet", q=prompts)), TASK)
    one, other = party.claim(2)
    assert (one.request.payload or "")[:200] == (other.request.payload or "")[:200]
    assert one.job_id != other.job_id


def test_a_window_is_kept_from_claim_to_claim_and_closed_at_the_end(
    store: Store, party: Party, write_input: WriteInput, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new one for each claim would read the first rows of each job again."""
    made: list[Lookahead] = []
    closed: list[Lookahead] = []

    class Counted(Lookahead):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            made.append(self)
            super().__init__(*arguments, **named)

        def close(self) -> None:
            closed.append(self)
            super().close()

    monkeypatch.setattr("conserve.jobs.harvest.ledger.Lookahead", Counted)
    submit(store, str(write_input("other.parquet", q=["w", "x", "y", "z"])), TASK)
    assert [len(party.claim(1)) for _ in range(2)] == [1, 1]
    assert (len(made), closed) == (1, [])
    party.ledger.reopen()
    assert closed == made
    assert len(party.claim(2)) == 2
    party.ledger.close()
    assert closed == made
    assert len(made) == 2
    assert party.ledger._workload.seen() == []


def test_rows_that_others_took_while_they_were_chosen_are_left_to_them(
    store: Store, party: Party, write_input: WriteInput, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(store, str(write_input("other.parquet", q=["x"])), TASK)
    with monkeypatch.context() as patch:
        patch.setattr(choice, "choose", lambda *_: [])
        assert party.claim() == []
    assert len(party.claim()) == 5


def test_damage_of_the_whole_store_refuses_no_job(
    store: Store, party: Party, write_input: WriteInput, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(store, str(write_input("other.parquet", q=["x"])), TASK)

    def broken(*_: object) -> object:
        raise StoreDamaged("the folder of jobs is gone")

    monkeypatch.setattr(Lookahead, "take", broken)
    with pytest.raises(StoreDamaged, match="folder of jobs"):
        party.claim()
    assert party.tally.refused == {}
    assert job(store, job_id).state is JobState.QUEUED


def test_results_wait_in_the_journal_while_the_place_of_shards_is_out_of_reach(
    store: Store, job_id: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried again after half a minute, with whatever was completed meanwhile."""
    clock, tries, compact = Clock(), [], shards.compact

    def away(*arguments: Any, **named: Any) -> int | None:
        tries.append(clock.now)
        if len(tries) == 1:
            raise StoreUnreachable("the bucket is away")
        return compact(*arguments, **named)

    monkeypatch.setattr(shards, "compact", away)
    recorder = Recorder(store, clock, monotonic=clock)
    lease = leased(store)
    record(recorder, Outcomes(finished=[Finished(lease.epoch, job_id, p, result(p)) for p in range(4)]))
    assert [record.getMessage() for record in caplog.records] == [
        "results stay in the database for now: the bucket is away"
    ]
    for seconds, left in ((29.9, 4), (0.1, 0)):
        clock.now += seconds
        record(recorder, Outcomes())
        assert select(store, "select count(*) from journal") == [(left,)]
    assert tries == [1000.0, 1030.0]


def test_a_suspect_is_claimed_alone(store: Store, party: Party, job_id: str) -> None:
    works = party.claim()
    party.put_back(*works[:2], suspect=True)
    assert party.claim() == []
    assert row_numbers(party.claim(suspect=True)) == [0]


@pytest.mark.sqlite
def test_a_store_file_that_is_gone_or_another_one_is_noticed(store: Store) -> None:
    file = StoreFile.of(store)
    assert file is not None
    file.check()
    path = store.home / "conserve.db"
    content = path.read_bytes()
    path.rename(path.with_name("away"))
    with pytest.raises(StoreError, match="cannot be opened: No such file"):
        file.check()
    with pytest.raises(StoreError, match="cannot be opened"):
        StoreFile.of(store)
    path.write_bytes(content)
    with pytest.raises(StoreError, match="was replaced by another file"):
        file.check()


def test_returned_rows_are_those_of_this_lease_only(store: Store, job_id: str) -> None:
    first, second = leased(store, limit=2), leased(store, limit=2)
    put_back(store, second, 0)
    assert select(store, "select count(*) from request where epoch is null") == [(0,)]
    assert positions(first) == [0, 1]


def test_shares_are_claimed_across_priorities(store: Store, write_input: WriteInput) -> None:
    given = Input(names=[str(write_input(q=[f"row {n}" for n in range(40)]))], keep=Keep.REFERENCE)
    high, low = (submit(store, given, TASK, priority=priority).job_id for priority in (10, 0))
    party = Party(store, share="10=3,0=1")
    works = party.claim(8)
    assert [work.job_id for work in works] == [high] * 6 + [low] * 2, "rows of a job stay together"
    assert row_numbers(works) == [0, 1, 2, 3, 4, 5, 0, 1]
    party.put_back(*works[:6])
    again = party.claim(6)
    assert {work.job_id for work in again} == {high}, "rows that go back are charged to no group"
    party.finish(*works[6:], prompt_tokens=80, completion_tokens=20)
    party.finish(*again, prompt_tokens=40, completion_tokens=10)
    jobs = [work.job_id for work in party.claim(10)]
    assert jobs.count(high) == 9, "it is behind, and its rows are half as long"
    assert party.ledger._shares is not None
    assert party.ledger._shares._ended == {Group(10): (6, 300.0), Group(0): (2, 200.0)}
    assert len(party.claim(100)) == 80 - 8 - 10, "all that is left"
    assert party.claim(8) == []
    party.ledger.close()


@pytest.mark.parametrize("end", ["renew", "recover"])
def test_rows_that_others_took_over_are_charged_to_no_group(
    store: Store, write_input: WriteInput, end: str
) -> None:
    given = Input(names=[str(write_input(q=[f"row {n}" for n in range(40)]))], keep=Keep.REFERENCE)
    high, low = (submit(store, given, TASK, priority=priority).job_id for priority in (10, 0))
    party = Party(store, share="10=1,0=1")
    shares = party.ledger._shares
    assert shares is not None
    works = party.claim(8)
    assert party.ledger.renew({work.epoch for work in works}) == {work.epoch for work in works}
    assert set(shares._in_flight) == {work.key for work in works}
    with store.write() as tx:
        leases.abandon(tx, [party.ledger.owner])
    if end == "renew":
        assert party.ledger.renew({work.epoch for work in works}) == set()
    else:
        party.ledger.recover()
    assert (shares._in_flight, {*shares._counts.values()}) == ({}, {0.0}), (high, low)
    party.ledger.close()


def test_what_a_group_has_not_is_dealt_to_the_others_within_the_limit(
    store: Store, write_input: WriteInput
) -> None:
    few, many = (
        submit(store, Input(names=[str(write_input(f"{n}.parquet", q=["a"] * n))]), TASK, priority=n).job_id
        for n in (2, 40)
    )
    party = Party(store, share="2=1,40=1")
    works = party.claim(8)
    assert [work.job_id for work in works].count(few) == 2
    assert [work.job_id for work in works].count(many) == 6
    party.ledger.close()


def test_a_share_that_a_group_does_not_use_is_the_others(store: Store, write_input: WriteInput) -> None:
    given = Input(names=[str(write_input(q=["a", "b", "c", "d"]))], keep=Keep.REFERENCE)
    jobs = [submit(store, given, TASK, priority=priority).job_id for priority in (10, 10, 0)]
    party = Party(store, share="10=1,0=1")
    works = party.claim(100)
    assert sorted(work.key for work in works) == sorted((job, row) for job in jobs for row in range(4))
    assert party.claim(100) == []
    alike = Party(store, share="jobs")
    party.put_back(*works)
    assert len({work.job_id for work in alike.claim(3)}) == 3
    party.ledger.close()
    alike.ledger.close()


def test_time_without_rows_is_not_counted_as_harvested(
    store: Store, party: Party, write_input: WriteInput, job_id: str
) -> None:
    works = party.claim()
    party.tally.in_flight = len(works)
    party.clock.now += 100
    assert party.claim() == []  # while rows are in flight
    party.tally.in_flight = 0
    assert party.claim() == []  # what the last rows took is not written yet
    party.finish(*works)
    party.clock.now += 36_000
    assert party.claim() == []
    given = Input(names=[str(write_input(q=["e"]))], keep=Keep.REFERENCE)
    later = submit(store, given, TASK).job_id
    (work,) = party.claim()
    party.clock.now += 10
    party.finish(work)
    assert work.job_id == later
    with store.read() as tx:
        assert sum(slot.busy_s for slot in harvested.slots(tx)) == pytest.approx(110)


def test_an_observer_hears_of_rows_that_were_claimed(store: Store, party: Party, job_id: str) -> None:
    heard: list[tuple[list[int], float, float]] = []

    class Heard(Observer):
        def claimed(self, works: Sequence[ReadyRow], *, begun: float, seconds: float) -> None:
            heard.append(([work.row.position for work in works], begun, seconds))

    party.ledger._observer = Heard()
    for _ in range(3):
        party.claim(3)
        party.clock.now += 1.0
    assert heard == [([0, 1, 2], 1000.0, 0.0), ([3], 1001.0, 0.0)]


def test_jobs_of_another_model_count_as_refused_while_they_are_queued(
    store: Store, party: Party, job_id: str
) -> None:
    other = Party(store)
    other.ledger.model, party.ledger.model = "model-b", "model-a"
    (work,) = other.claim(1)
    assert party.claim() == []
    party.ledger.nothing_left()
    assert list(party.tally.refused) == [job_id]
    assert "is bound to model-b and this run has model-a" in party.refused[job_id]
    other.finish(work)
    with store.write() as tx:
        catalog.move(tx, job_id, "cancel", now=0.0)
    party.ledger.nothing_left()
    assert party.tally.refused == {}
    other.ledger.close()


def test_a_claim_ends_jobs_that_are_late_and_counts_those_of_this_run(
    store: Store, party: Party, job_id: str
) -> None:
    add_job(store, "elsewhere")
    party.ledger._only = [job_id]
    with store.write() as tx:
        for name in (job_id, "elsewhere"):
            catalog.set_deadline(tx, name, 1005.0)
    assert len(party.claim(2)) == 2
    party.clock.now = 1005.0
    assert party.claim(2) == []
    assert [job(store, name).state for name in (job_id, "elsewhere")] == [JobState.EXPIRED] * 2
    assert [*party.tally.cancelled] == [job_id]
    assert party.ledger.stopped_jobs() == {job_id}
    assert [*party.tally.cancelled] == [job_id]


def test_results_of_a_job_that_comes_back_gather_for_a_shard_again(store: Store, job_id: str) -> None:
    recorder = Recorder(store, Clock())
    lease = leased(store)
    ends = [Finished(lease.epoch, job_id, p, result(p, failed=p > 1)) for p in range(4)]
    record(recorder, Outcomes(finished=ends))
    assert recorder.compact()
    assert select(store, "select count(*) from journal") == [(0,)]
    shards.retry_failed(store, job_id, now=0.0)
    lease = leased(store)
    for position, left in ((2, 1), (3, 0)):
        record(recorder, outcomes_of(lease, [position]))
        assert select(store, "select count(*) from journal") == [(left,)]


def test_a_suspect_runs_alone_beside_shares_too(store: Store, job_id: str) -> None:
    party = Party(store, share="jobs")
    works = party.claim()
    party.put_back(works[1], suspect=True)
    assert party.claim() == []
    assert row_numbers(party.claim(1, suspect=True)) == [1]
    party.ledger.close()


class Busy:
    """A recorder, and a job whose rows end one after the other with so many tokens each."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.clock, self.notes = store, Clock(), [0]
        add_job(store, rows=8)
        self.lease = leased(store)
        self.set_by = 0.0  # that the wall clock is ahead of the other
        self.recorder = Recorder(store, lambda: self.clock.now + self.set_by, monotonic=self.clock)
        self.recorder.begin()
        note = harvested.note

        def counted(*arguments: Any, **named: Any) -> None:
            self.notes[0] += 1
            note(*arguments, **named)

        monkeypatch.setattr(harvested, "note", counted)

    def end(self, position: int, tokens: int, *, at: float) -> None:
        self.clock.now = at
        ended = result(position, prompt_tokens=tokens, completion_tokens=tokens, cached_tokens=tokens)
        self.recorder.write(Outcomes(finished=[Finished(self.lease.epoch, "job-1", position, ended)]))

    @property
    def harvested(self) -> tuple[float, float]:
        with self.store.read() as tx:
            slots = harvested.slots(tx)
        return sum(slot.tokens for slot in slots), sum(slot.busy_s for slot in slots)


def test_tokens_of_a_second_are_noted_together_whatever_is_claimed_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Busy(store, monkeypatch)
    busy.end(0, 10, at=1000.4)
    busy.end(1, 20, at=1000.8)
    busy.recorder.begin()
    assert busy.harvested == (0, 0)
    busy.end(2, 30, at=1001.2)
    assert busy.harvested == (60, pytest.approx(1.2))
    busy.end(3, 40, at=1001.9)
    busy.end(4, 50, at=1002.2)
    assert busy.harvested == (150, pytest.approx(2.2))
    assert busy.notes == [2]


def test_results_are_written_whether_their_tokens_can_be_noted_or_not(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    busy = Busy(store, monkeypatch)
    note = harvested.note

    def refused(*_: Any, **__: Any) -> None:
        raise StoreError("permission denied for table harvested")

    monkeypatch.setattr(harvested, "note", refused)
    for position in range(2):
        busy.end(position, 10, at=1002.0 + 2 * position)
    assert job(store).succeeded == 2
    assert [record.message for record in caplog.records] == [
        "forecasts miss what is harvested from now on: permission denied for table harvested"
    ]
    monkeypatch.setattr(harvested, "note", note)
    busy.end(2, 10, at=1006.0)
    assert busy.harvested == (30, pytest.approx(6.0))


@pytest.mark.parametrize("set_by", [-1200.0, 21_600.0])
def test_only_time_that_passes_counts_when_the_clock_is_set(
    store: Store, monkeypatch: pytest.MonkeyPatch, set_by: float
) -> None:
    """A machine that was suspended looks as if its clock had been set forward."""
    busy = Busy(store, monkeypatch)
    busy.end(0, 10, at=1002.0)
    busy.set_by = set_by
    busy.end(1, 20, at=1005.0)
    assert busy.harvested == (30, pytest.approx(5.0))
    with store.read() as tx:
        assert {slot.slot for slot in harvested.slots(tx)} == {1, int((1005.0 + set_by) // 900.0)}


def test_an_observer_hears_of_results_that_moved_and_of_no_others(store: Store, job_id: str) -> None:
    heard: list[tuple[str, list[int]]] = []

    class Heard(Observer):
        def moved(self, job_id: str, positions: Sequence[int], *, begun: float, seconds: float) -> None:
            heard.append((job_id, list(positions)))

    other = add_job(store, "other", rows=1)
    recorder = Recorder(store, Clock(), Heard())
    for ended, rows in ((job_id, 4), (other, 1)):
        lease = leased(store)
        assert lease.job_id == ended
        with pytest.MonkeyPatch.context() as patch:
            if ended == other:
                patch.setattr(shards, "compact", lambda *_, **__: None)
            record(recorder, outcomes_of(lease, range(rows)))
    assert heard == [(job_id, [0, 1, 2, 3])]


def test_windows_of_groups_that_are_gone_are_closed(store: Store, write_input: WriteInput) -> None:
    given = Input(names=[str(write_input(q=["a", "b", "c", "d"]))], keep=Keep.REFERENCE)
    jobs = [submit(store, given, TASK).job_id for _ in range(2)]
    party = Party(store, share="jobs")
    assert len(party.claim(4)) == 4
    assert len(party.ledger._windows) == 2
    with store.write() as tx:
        catalog.refuse(tx, jobs[0], "as it is", FailedBy.INPUT, now=0.0)
    assert {work.job_id for work in party.claim(2)} == {jobs[1]}
    assert len(party.ledger._windows) == 1
    party.ledger.close()


def test_a_claim_by_shares_lists_all_jobs_once(
    store: Store, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Input(names=[str(write_input(q=["a", "b", "c", "d"]))], keep=Keep.REFERENCE)
    jobs = [submit(store, given, TASK).job_id for _ in range(12)]
    party = Party(store, share="jobs")
    listed, runnable_jobs = [], queue.runnable_jobs

    def counted(*given: Any, **named: Any) -> Sequence[Any]:
        found = runnable_jobs(*given, **named)
        listed.append(len(found))
        return found

    monkeypatch.setattr(queue, "runnable_jobs", counted)
    assert {work.job_id for work in party.claim(8)} == set(jobs[:8])
    assert listed == [12] + [1] * 8
    party.ledger.close()


def test_with_shares_a_job_that_waits_for_another_harvester_is_remembered(
    store: Store, job_id: str, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job alone is listed without the others, and claims of other groups change nothing."""
    given = Input(names=[str(write_input("other.parquet", q=["e", "f"]))], keep=Keep.REFERENCE)
    other = submit(store, given, TASK).job_id
    party, opened = Party(store, share="jobs"), workload.RequestFile
    path = layout.requests_file(store.data, job_id)

    def closed(asked: Path, *given: Any, **named: Any) -> Any:
        if asked == path:
            raise StoreForbidden("closed", job_id=job_id)
        return opened(asked, *given, **named)

    monkeypatch.setattr(workload, "RequestFile", closed)
    for _ in range(2):
        assert {work.job_id for work in party.claim(1)} == {other}
        assert party.refused == {job_id: "closed"}
    assert not party.ledger.claimable()
    party.ledger.close()


def test_each_group_has_turns_of_its_own(store: Store) -> None:
    """One claim in five is for jobs without a deadline, in the claims of each group and not of all together."""
    turns = Turns(store, lambda: 0.0)
    given: dict[int, int] = {}
    for number in range(50):
        group = number % 5
        turns.ordered([], now=0.0, group=group)
        given[group] = given.get(group, 0) + is_others_turn(turns._turn, SHARE)
    assert given == dict.fromkeys(range(5), 2)
