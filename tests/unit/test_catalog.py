"""Jobs in the catalogue, and what `conserve status` reads of them."""

import sqlite3
from dataclasses import fields, replace
from pathlib import Path

import pytest
from sqlalchemy import Connection, insert, text

from conserve.config import Settings, load
from conserve.errors import (
    JobNotFound,
    JobRefused,
    StoreDamaged,
    StoreError,
    StoreMoved,
    StoreReadOnly,
    StoreTooNew,
)
from conserve.store.books import catalog, readings
from conserve.store.books.catalog import InputFile, Source
from conserve.store.books.job_names import FIRST_JOB, resolve
from conserve.store.books.job_terms import JobTerms
from conserve.store.books.readings import (
    JOBS,
    JobReading,
    data,
    job_named,
    opened,
    read_harvested,
    read_jobs,
    row_order,
    untaken,
)
from conserve.store.books.states import FailedBy, JobState
from conserve.store.database import moves, schema
from conserve.store.database.store import Store
from conserve.store.database.versions import LATEST
from conserve.store.files.digests import Seal
from conserve.store.files.objects import ObjectPath
from tests.store_rows import LEASE_S, add_job, finish, job, leased, put_back

SOURCE = Source(path="/data/in.jsonl", format="jsonl", size=7, mtime_ns=8, digest="d", copied=True)


def move(store: Store, verb: str, *, now: float = 0.0, job_id: str = "job-1") -> catalog.JobRecord:
    with store.write() as tx:
        return catalog.move(tx, job_id, verb, now=now)


def refuse(store: Store, now: float = 0.0) -> None:
    with store.write() as tx:
        catalog.refuse(tx, "job-1", "its input changed", FailedBy.INPUT, now=now)


@pytest.fixture(params=["sqlite3", "sqlalchemy"])
def read_settings(request: pytest.FixtureRequest, settings: Settings) -> Settings:
    """The same store, to be read through the standard library and as any other database is."""
    if request.param == "sqlite3":
        return settings
    return replace(settings, store=settings.store_url.replace("sqlite:", "sqlite+pysqlite:"))


def test_a_job_is_stored_as_it_was_submitted(store: Store) -> None:
    with store.write() as tx:
        catalog.add(
            tx, "a", JobTerms(priority=3), task='{"kind":"prompt"}', source=SOURCE, num_rows=9, now=4.0
        )
        assert catalog.taken(tx, "a")
        assert not catalog.taken(tx, "b")
        found = catalog.get(tx, "a")
    assert found.source == SOURCE
    assert Source(path=None, format="x") == Source(
        path=None, format="x", size=0, mtime_ns=0, digest="", copied=False
    )
    assert (found.id, found.task, found.num_rows, found.priority) == ("a", '{"kind":"prompt"}', 9, 3)
    assert (found.state, found.error, found.next_position) == (JobState.QUEUED, None, 0)
    assert (found.submitted_at, found.started_at, found.finished_at) == (4.0, None, None)


def test_jobs_are_listed_as_they_were_submitted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for job_id in ("b", "c", "a"):
        add_job(store, job_id)
    with store.read() as tx:
        assert catalog.ids(tx) == ["b", "c", "a"]
        assert [found.id for found in catalog.everything(tx)] == ["b", "c", "a"]
        assert catalog.states(tx, ["a", "c", "unknown"]) == {"a": JobState.QUEUED, "c": JobState.QUEUED}
        many = [
            f"unknown-{number}" for number in range(70_000)
        ]  # more than one statement of PostgreSQL takes
        assert catalog.states(tx, ["a", *many, "c"]) == {"a": JobState.QUEUED, "c": JobState.QUEUED}
        assert catalog.get(tx, "last").id == "a"
        for odd in ("a\0", "\ud800", "d"):
            with pytest.raises(JobNotFound):
                catalog.get(tx, odd)
        monkeypatch.setattr(catalog, "ids", None)
        assert catalog.get(tx, "c").id == "c", "of a full id no other is read"


def test_a_paused_job_can_go_on_or_be_cancelled(store: Store) -> None:
    add_job(store)
    assert move(store, "pause").state is JobState.PAUSED
    assert move(store, "pause").state is JobState.PAUSED
    assert move(store, "resume").state is JobState.QUEUED
    move(store, "pause")
    cancelled = move(store, "cancel", now=5.0)
    assert (cancelled.state, cancelled.finished_at) == (JobState.CANCELLED, 5.0)
    assert move(store, "cancel", now=6.0).finished_at == 5.0, "which changes nothing"


@pytest.mark.parametrize(
    ("verb", "state", "finished_at"),
    [("resume", JobState.QUEUED, None), ("cancel", JobState.CANCELLED, 7.0)],
)
def test_a_refused_job_says_why_until_it_is_told_something_else(
    store: Store, verb: str, state: JobState, finished_at: float | None
) -> None:
    add_job(store)
    add_job(store, "other")
    refuse(store, now=5.0)
    found = job(store)
    assert (found.state, found.error, found.finished_at) == (JobState.FAILED, "its input changed", 5.0)
    assert found.failed_by is FailedBy.INPUT
    found = move(store, verb, now=7.0)
    assert (found.state, found.error, found.finished_at) == (state, None, finished_at)
    assert found.failed_by is None
    assert job(store, "other").state is JobState.QUEUED


@pytest.mark.parametrize(
    ("done", "verb"), [("cancel", "pause"), ("cancel", "resume"), ("refuse", "pause"), ("complete", "cancel")]
)
def test_what_makes_no_sense_is_refused(store: Store, done: str, verb: str) -> None:
    add_job(store, rows=1)
    if done == "cancel":
        move(store, "cancel")
    elif done == "refuse":
        refuse(store)
    else:
        finish(store, leased(store))
    before = job(store)
    with pytest.raises(JobRefused, match=f"job-1 is {before.state}, so there is nothing to {verb}"):
        move(store, verb)
    assert job(store) == before


@pytest.mark.parametrize("verb", ["pause", "cancel"])
def test_only_a_queued_job_is_refused(store: Store, verb: str) -> None:
    add_job(store)
    before = move(store, verb)
    refuse(store)
    assert job(store) == before


@pytest.mark.parametrize("by", FailedBy)
def test_only_a_job_that_was_refused_for_damage_is_forgiven(store: Store, by: FailedBy) -> None:
    """Whatever the sentence says."""
    forgiven, reason = by is FailedBy.DAMAGE, "the requests are as they are"
    add_job(store)
    with store.write() as tx:
        catalog.refuse(tx, "job-1", reason, by, now=5.0)
        assert catalog.get(tx, "job-1").failed_by is by
        assert catalog.forgive(tx, "job-1", now=6.0) is forgiven
    found = job(store)
    refused = (JobState.FAILED, reason, by, 5.0)
    assert (found.state, found.error, found.failed_by, found.finished_at) == (
        (JobState.QUEUED, None, None, None) if forgiven else refused
    )
    with store.write() as tx:
        assert not catalog.forgive(tx, "job-1", now=7.0), "once"


def test_forgiving_concerns_one_job_and_none_that_runs(store: Store) -> None:
    for job_id in ("job-1", "job-2"):
        add_job(store, job_id)
    with store.write() as tx:
        assert catalog.fail(tx, "job-1", "the record is lost", FailedBy.DAMAGE, now=5.0)
        assert not catalog.forgive(tx, "job-2", now=6.0)
        assert catalog.states(tx, ["job-1", "job-2"]) == {"job-1": JobState.FAILED, "job-2": JobState.QUEUED}


@pytest.mark.parametrize(
    ("state", "fails"),
    [("queued", True), ("paused", True), ("failed", True), ("cancelled", False), ("expired", False)],
)
def test_a_job_with_rows_left_fails_unless_it_was_stopped_for_good(
    store: Store, state: str, fails: bool
) -> None:
    add_job(store)
    with store.write() as tx:
        tx.execute(
            text("update job set state = :state, error = 'before', finished_at = 1.0"), {"state": state}
        )
        assert catalog.fail(tx, "job-1", "lost", FailedBy.INPUT, now=5.0) is fails
    found = job(store)
    assert (found.state, found.error, found.failed_by, found.finished_at) == (
        (JobState.FAILED, "lost", "input", 5.0) if fails else (state, "before", None, 1.0)
    )


def test_a_job_whose_rows_all_have_results_does_not_fail(store: Store) -> None:
    add_job(store, rows=2)
    finish(store, leased(store), failed=[1])
    with store.write() as tx:
        tx.execute(text("update job set state = 'queued'"))
        assert not catalog.fail(tx, "job-1", "lost", FailedBy.INPUT, now=5.0)


def test_rows_without_a_result_are_those_left(store: Store, settings: Settings) -> None:
    add_job(store, rows=9)
    finish(store, leased(store, limit=5), failed=[0, 1])
    (reading,) = read_jobs(settings, now=0.0)
    assert (job(store).unanswered, reading.unanswered, reading.done) == (4, 4, 5)


@pytest.mark.sqlite
def test_status_reads_no_row_that_waits(store: Store) -> None:
    """Rows in flight are found by their leases, and not among all records of their job."""
    with store.write() as tx:
        for _ in range(2):
            plan = tx.exec_driver_sql(f"explain query plan {JOBS}", {"now": 0.0}).all()
            records = [row[-1] for row in plan if "request" in row[-1]]
            assert [words.partition(" (")[2] for words in records] == ["epoch=? AND job_id=?)"]
            tx.execute(text("analyze"))


def test_a_file_that_was_made_anew_keeps_the_seals_of_the_others(store: Store) -> None:
    old, new = Seal(bytes=1, digest="old"), Seal(bytes=2, digest="new")
    add_job(store, files={"inputs.parquet": old, "requests.parquet": old})
    add_job(store, "job-2", files={"requests.parquet": old})
    with store.write() as tx:
        catalog.keep_seal(tx, "job-1", "requests.parquet", new)
    assert job(store).files == {"inputs.parquet": old, "requests.parquet": new}
    assert job(store, "job-2").files == {"requests.parquet": old}


DAMAGES = ["source = '{'", "source = '[]'", "task = '3'", "files = '{\"a\": 1}'", "tags = '[1]'"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_hides_no_other_job_and_is_named(store: Store, damage: str) -> None:
    for job_id in ("job-1", "job-2"):
        add_job(store, job_id)
    with store.write() as tx:
        tx.execute(text(f"update job set {damage.replace(':', chr(92) + ':')} where id = 'job-1'"))
    with store.read() as tx:
        assert [found.id for found in catalog.everything(tx)] == ["job-2"]
        assert [catalog.is_readable(catalog.record(tx, f"job-{n}")) for n in (1, 2)] == [False, True]
        assert catalog.get_id(tx, "job-1") == "job-1"
        with pytest.raises(StoreDamaged, match=r"job job-1 is damaged .*; run: conserve check job-1") as said:
            catalog.get(tx, "job-1")
        assert said.value.job_id == "job-1"


@pytest.mark.sqlite
@pytest.mark.parametrize(
    "damage",
    [
        *("state = 'gone'", "error = x'00'", "task = '3'", "task = '{'", "priority = 'high'"),
        *("submitted_at = 'now'", "finished_at = 'now'", "started_at = 'now'", "num_rows = 'many'"),
        *("failed = 'x'", "retries = 0.5", "succeeded = 'x'"),
        *("prompt_tokens = 'x'", "resumed_tokens = 'x'", "model = x'00'", "tags = '3'", "tags = '{'"),
        *("deadline = 'soon'", "on_late = 'never'", "failed_by = 'chance'"),
    ],
)  # fmt: skip
def test_status_shows_a_damaged_record_as_a_job_that_failed_for_it(
    store: Store, settings: Settings, damage: str
) -> None:
    for job_id in ("job-1", "job-2"):
        add_job(store, job_id)
    with store.write() as tx:
        tx.exec_driver_sql("pragma ignore_check_constraints = on")
        tx.execute(text(f"update job set {damage} where id = 'job-1'"))
    damaged, other = read_jobs(settings, now=0.0)
    assert (damaged.id, damaged.state) == ("job-1", JobState.FAILED)
    assert damaged.error == "its record is damaged; run: conserve check job-1"
    assert damaged.failed_by is FailedBy.DAMAGE
    assert (damaged.rows, damaged.waiting, damaged.running, damaged.submitted_at) == (0, 0, 0, 0.0)
    assert (damaged.row_order, damaged.model, damaged.tags, damaged.deadline) == ("input", None, {}, None)
    assert (other.state, other.rows) == (JobState.QUEUED, 4)


@pytest.mark.sqlite
def test_an_unknown_state_is_damage(store: Store) -> None:
    add_job(store)
    with store.write() as tx:
        tx.exec_driver_sql("pragma ignore_check_constraints = on")
        tx.execute(text("update job set state = 'gone'"))
        assert catalog.states(tx, ["job-1"]) == {"job-1": JobState.FAILED}


def test_files_of_an_input_are_its_parts_or_the_one_that_it_is() -> None:
    whole = InputFile(path="/data/in.jsonl", size=7, mtime_ns=8, digest="d")
    assert SOURCE.files == (whole,)
    assert replace(SOURCE, parts=(whole, whole)).files == (whole, whole)
    assert replace(SOURCE, path=None).files == ()


def test_jobs_of_a_name_are_those_with_one_word_of_characters_behind_it(store: Store) -> None:
    """Four of them, or twelve in a bucket."""
    for job_id in ("gsm-zzzz", "gsm-aaaa", "gsm-bbbbccccdddd", "gsm-abc", "gsm-hard-aaaa", "xgsm-aaaa"):
        add_job(store, job_id)
    with store.read() as tx:
        assert catalog.named(tx, "gsm") == ["gsm-zzzz", "gsm-aaaa", "gsm-bbbbccccdddd"]


def test_queued_jobs_of_other_models_are_named_with_these(store: Store) -> None:
    for job_id, model in {"job-2": "b", "job-1": "c", "job-3": "a", "job-4": None, "job-5": "b"}.items():
        add_job(store, job_id, model=model)
    move(store, "pause", job_id="job-5")
    with store.write() as tx:
        assert catalog.of_other_models(tx, "a", None) == {"job-2": "b", "job-1": "c"}
        assert catalog.of_other_models(tx, "a", ["job-1", "job-3", "job-4"]) == {"job-1": "c"}
        assert catalog.of_other_models(tx, "a", []) == {}
        catalog.rebind(tx, ["job-1", "job-4"], "a")
        assert catalog.of_other_models(tx, "a", None) == {"job-2": "b"}
    assert [job(store, f"job-{n}").model for n in (1, 2, 4)] == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("state", "retried"), [("completed", False), ("cancelled", False), ("expired", True)]
)
def test_a_job_that_has_ended_gets_no_deadline(store: Store, state: str, retried: bool) -> None:
    add_job(store)
    with store.write() as tx:
        tx.execute(text("update job set state = :state"), {"state": state})
    with pytest.raises(JobRefused) as said, store.write() as tx:
        catalog.set_deadline(tx, "job-1", 9.0)
    hint = "; run: conserve retry job-1" if retried else ""
    assert str(said.value) == f"job job-1 is {state}, so it has no deadline any more{hint}"


def test_final_states_are_those_that_nothing_but_the_user_changes() -> None:
    assert {state for state in JobState if state.final} == {
        JobState.COMPLETED,
        JobState.FAILED,
        JobState.CANCELLED,
        JobState.EXPIRED,
    }


def test_status_reads_the_counters_of_every_job(store: Store, read_settings: Settings) -> None:
    add_job(store, "first", 9, priority=2, now=4.0, task='{"order":"random","order_seed":7}')
    add_job(store, "second", 3, now=5.0)
    lease = leased(store, now=10.0, limit=6)
    tokens = {"prompt_tokens": 8, "completion_tokens": 5, "cached_tokens": 6, "resumed_tokens": 1}
    finish(store, lease, of=[0, 1, 2], failed=[1], **tokens)
    put_back(store, lease, 3, failed=True)
    first, second = read_jobs(read_settings, now=11.0)
    assert first == JobReading(
        id="first",
        state=JobState.RUNNING,
        error=None,
        priority=2,
        submitted_at=4.0,
        started_at=10.0,
        finished_at=None,
        rows=9,
        waiting=4,
        running=2,
        succeeded=2,
        failed=1,
        retries=1,
        prompt_tokens=24,
        completion_tokens=15,
        cached_tokens=18,
        resumed_tokens=3,
        row_order="random:7",
    )
    assert (first.done, first.hit_rate) == (3, 0.75)
    assert (second.id, second.state, second.waiting, second.hit_rate) == ("second", JobState.QUEUED, 3, None)
    assert untaken(read_settings, "first") == [3, 6]
    assert untaken(read_settings, "second") == [0]


def test_status_reads_why_a_job_failed(store: Store, read_settings: Settings) -> None:
    add_job(store)
    refuse(store)
    (found,) = read_jobs(read_settings, now=0.0)
    assert (found.state, found.failed_by) == (JobState.FAILED, FailedBy.INPUT)


def test_jobs_that_are_asked_for_are_read_alone(store: Store, read_settings: Settings) -> None:
    for name in ("first", "second", "third"):
        add_job(store, name, 1)
    leased(store, now=10.0)
    everything = read_jobs(read_settings, now=11.0)
    assert read_jobs(read_settings, now=11.0, only=["third", "none", "first"]) == [
        everything[2],
        everything[0],
    ]
    assert read_jobs(read_settings, now=11.0, only=[]) == []


def test_a_reading_has_all_that_the_catalogue_has_but_where_the_job_came_from() -> None:
    named = {field.name for field in fields(catalog.JobRecord)} - {
        "seq",
        "source",
        "task",
        "num_rows",
        "next_position",
        "files",
    }
    assert named <= {field.name for field in fields(JobReading)}


@pytest.mark.parametrize(
    ("verb", "now", "state"),
    [
        (None, LEASE_S - 0.1, JobState.RUNNING),
        (None, LEASE_S, JobState.QUEUED),
        ("pause", 0.0, JobState.PAUSED),
        ("cancel", 0.0, JobState.CANCELLED),
    ],
)
def test_a_job_runs_while_it_is_queued_and_a_lease_of_its_rows_lives(
    store: Store, settings: Settings, verb: str | None, now: float, state: JobState
) -> None:
    add_job(store)
    leased(store)
    if verb:
        move(store, verb)
    (reading,) = read_jobs(settings, now=now)
    assert reading.state is state


def test_where_there_is_no_store_there_are_no_jobs(tmp_path: Path) -> None:
    nowhere = load({"home": tmp_path / "nowhere"}, environ={})
    assert read_jobs(nowhere, now=0.0) == []
    assert untaken(nowhere, "job-1") == []
    assert not nowhere.home.exists()


def test_what_is_no_store_is_named(settings: Settings) -> None:
    settings.home.mkdir(parents=True)
    path = settings.home / "conserve.db"
    path.write_bytes(b"this is no database, whatever its name says" * 100)
    with pytest.raises(StoreError, match=r"conserve\.db cannot be read .*not a database"):
        read_jobs(settings, now=0.0)


@pytest.mark.sqlite
def test_a_log_of_another_user_is_told_from_damage(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a reader of an SQLite database writes to its log."""

    def refuse(path: Path, timeout_s: float) -> sqlite3.Connection:
        error = sqlite3.OperationalError("attempt to write a readonly database")
        error.sqlite_errorname = "SQLITE_READONLY_DIRECTORY"  # type: ignore[misc]
        raise error

    monkeypatch.setattr(readings, "reader", refuse)
    with pytest.raises(StoreReadOnly, match="conserve"):
        read_jobs(settings, now=0.0)


def test_a_store_that_was_read_is_closed(settings: Settings) -> None:
    def open_files() -> list[Path]:
        found = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return [path for path in found if path.is_relative_to(settings.home)]

    Store.open(settings).close()
    with opened(settings) as query:
        assert query is not None
        assert open_files()
    assert open_files() == []


def test_reading_changes_nothing(store: Store, settings: Settings) -> None:
    def delete() -> None:
        with opened(settings) as query:
            assert query is not None
            query("delete from meta", {})

    with pytest.raises(StoreError, match="read-only"):
        delete()


def test_an_awkward_home_is_read(tmp_path: Path) -> None:
    settings = load({"home": tmp_path / "an awkward 100% #1"}, environ={})
    store = Store.open(settings)
    add_job(store)
    store.close()
    assert [reading.id for reading in read_jobs(settings, now=0.0)] == ["job-1"]


def set_version(store: Store, version: int) -> None:
    with store.write() as tx:
        tx.execute(text("update meta set value = :v where key = 'version'"), {"v": str(version)})


def test_a_store_of_the_future_is_not_read(store: Store, read_settings: Settings) -> None:
    assert read_jobs(read_settings, now=0.0) == []
    set_version(store, LATEST + 1)
    said = f"has version {LATEST + 1} and this ConServe knows only up to {LATEST}"
    with pytest.raises(StoreTooNew, match=said):
        read_jobs(read_settings, now=0.0)


def test_a_store_of_the_past_is_read_as_it_is(store: Store, settings: Settings) -> None:
    set_version(store, 0)
    assert read_jobs(settings, now=0.0) == []


def test_a_database_without_a_version_is_read(settings: Settings) -> None:
    """One that `conserve` is making just now has its tables and no version yet."""
    settings.home.mkdir(parents=True)
    with sqlite3.connect(settings.home / "conserve.db") as database:
        database.execute("create table meta (key text primary key, value text not null)")
        database.execute("create table job (id text, next_position integer)")
        database.execute("create table request (job_id text, position integer, epoch integer)")
    database.close()
    assert untaken(settings, "job-1") == []


def test_a_store_that_is_being_moved_is_not_read(store: Store, read_settings: Settings) -> None:
    mark = moves.MoveMark(id="m", state=moves.MoveState.LEFT, other="there", store_id=store.id)
    with store.write() as tx:
        tx.execute(
            text("insert into meta values (:key, :mark)"), {"key": moves.KEY, "mark": moves.to_text(mark)}
        )
    with pytest.raises(StoreMoved, match="this store was moved to there"):
        read_jobs(read_settings, now=0.0)


@pytest.mark.parametrize(
    ("written", "place"),
    [(None, None), ("/files", Path("/files")), ("s3://lake/team?region=eu-1", "s3://lake/team")],
)
def test_the_place_of_the_files_is_the_one_that_the_database_names(
    store: Store, settings: Settings, written: str | None, place: Path | str | None
) -> None:
    if written is not None:
        with store.write() as tx:
            tx.execute(text("insert into meta values ('data', :data)"), {"data": written})
    found = data(settings)
    if isinstance(place, str):
        assert isinstance(found, ObjectPath)
        assert (str(found), found.bucket.region) == (f"{place}/{store.id}", "eu-1")
    else:
        assert found == (place or settings.home)


def test_where_there_is_no_store_its_files_are_to_lie_in_the_home(tmp_path: Path) -> None:
    nowhere = load({"home": tmp_path / "nowhere"}, environ={})
    assert data(nowhere) == nowhere.home
    assert read_harvested(nowhere) == []


@pytest.mark.sqlite
def test_a_slot_of_damaged_figures_is_left_out(store: Store, settings: Settings) -> None:
    with store.write() as tx:
        tx.execute(text("insert into harvested values (3, 1.0, 2.0, 0.0), (2, 5.0, 6.0, 0.0)"))
        tx.execute(text("insert into harvested values (4, 'x', 2.0, 0.0)"))
    assert read_harvested(settings) == [(2, 5.0, 6.0), (3, 1.0, 2.0)]


KNOWN = ["gsm-aaaa", "gsm-bbbb", "mmlu-cccc"]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("gsm-aaaa", "gsm-aaaa"),
        ("last", "mmlu-cccc"),
        ("gsm-b", "gsm-bbbb"),
        ("m", "mmlu-cccc"),
        ("mmlu", "mmlu-cccc"),
    ],
)
def test_a_job_is_found_by_what_names_no_other(wanted: str, found: str) -> None:
    assert resolve(KNOWN, wanted) == found


def test_a_job_called_last_or_like_the_beginning_of_another_is_found_by_its_name() -> None:
    assert resolve(["last", "other"], "last") == "last"
    assert resolve(["a", "ab"], "a") == "a"
    assert resolve(["night-f8d7", "night-eval-uzap"], "night") == "night-f8d7"


@pytest.mark.parametrize(
    ("known", "wanted", "said"),
    [
        (KNOWN, "gsm", "'gsm' could be gsm-aaaa, gsm-bbbb; type more of it"),
        (KNOWN, "gsn-aaaa", "there is no job 'gsn-aaaa'; did you mean gsm-aaaa?"),
        (KNOWN, "xyz", "there is no job 'xyz'; run: conserve jobs"),
        (KNOWN, "", "there is no job ''; run: conserve jobs"),
        ([], "last", f"there is no job 'last', for there are no jobs yet; {FIRST_JOB}"),
    ],
)
def test_what_names_no_job_or_several_is_said(known: list[str], wanted: str, said: str) -> None:
    with pytest.raises(JobNotFound) as error:
        resolve(known, wanted)
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("batch_ab12", "job-1"),
        ("batch_a", "job-1"),
        ("batch_cd34", "job-2"),
        ("batch_own-aaaa", "batch_own-aaaa"),
        ("batch_", "'batch_' could be batch_own-aaaa, batch_ab12, batch_cd34, batch_ef56; type more of it"),
        ("batch_ef56", "batch_ef56 has no job: its input is still checked, or was refused"),
        ("batch_ffff", "there is no job 'batch_ffff'; did you mean batch_own-aaaa?"),
    ],
)
def test_a_job_is_found_by_the_id_of_its_batch_for_writers_and_readers(
    store: Store, read_settings: Settings, wanted: str, found: str
) -> None:
    for job_id in ("job-1", "job-2", "batch_own-aaaa"):
        add_job(store, job_id)
    with store.write() as tx:
        for batch_id, of in (("batch_ab12", "job-1"), ("batch_cd34", "job-2"), ("batch_ef56", None)):
            values = {"id": batch_id, "job_id": of, "project": "search", "created_at": 0.0}
            tx.execute(insert(schema.batch).values(values))

    def of_writer() -> str:
        with store.read() as tx:
            return catalog.get(tx, wanted).id

    def of_reader() -> str:
        return job_named(read_settings, read_jobs(read_settings, now=0.0), wanted)

    for ask in (of_writer, of_reader):
        try:
            said = ask()
        except JobNotFound as error:
            said = str(error)
        assert said == found


@pytest.mark.parametrize(
    ("task", "order"),
    [
        ("{}", "input"),
        ('{"order":"prefix","order_seed":7}', "prefix"),
        ('{"order":"random","order_seed":7}', "random:7"),
        ('{"order":"random"}', "random:0"),
    ],
)
def test_the_order_of_a_task_names_its_seed_where_that_decides(task: str, order: str) -> None:
    assert row_order(task) == order


@pytest.mark.sqlite
def test_a_reading_waits_for_a_store_that_is_just_being_made(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = settings.home / "conserve.db"
    path.parent.mkdir(parents=True)
    path.touch()
    looks: list[float] = []

    def make(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            Store.open(settings).close()

    monkeypatch.setattr(readings.time, "sleep", make)
    assert read_jobs(settings, now=0.0) == []
    assert len(looks) == 3


@pytest.mark.sqlite
def test_a_database_that_stays_empty_is_damage(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    path = settings.home / "conserve.db"
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.setattr(readings.time, "sleep", lambda seconds: None)
    with pytest.raises(StoreError, match="no such table: meta"):
        read_jobs(settings, now=0.0)


def test_a_job_that_is_removed_while_it_is_read_is_a_job_that_is_not_there(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On PostgreSQL each statement of a transaction that writes sees what others commit."""
    get_id = catalog.get_id

    def before(tx: Connection, job_id: str) -> str:
        monkeypatch.setattr(catalog, "get_id", get_id)
        return job_id

    monkeypatch.setattr(catalog, "get_id", before)
    with pytest.raises(JobNotFound, match="there is no job 'job-1'"), store.write() as tx:
        catalog.get(tx, "job-1")
