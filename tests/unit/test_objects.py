"""A store whose files are objects: the same commands, on a real S3 server, also while it fails."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve.config import Settings, load
from conserve.errors import StoreUnreachable
from conserve.jobs.harvest.outage import Outage
from conserve.jobs.task import Kind, Task
from conserve.store.books import shards
from conserve.store.database.store import Store
from conserve.store.files import bucket, layout, marks, multipart, trash
from conserve.store.files.bucket import Bucket
from conserve.store.files.objects import ObjectPath
from conserve.store.files.place import place_of
from conserve.store.upkeep import mending
from conserve.store.upkeep import sweep as sweeping
from conserve.store.upkeep.sweep import sweep
from tests.commands import conserve, process
from tests.s3 import KEYS, Fault, Proxy, Request, make_bucket, proxied, s3_server
from tests.store_rows import add_job, finish, leased
from tests.submitting import submit

pytest.importorskip("moto.server")
pytest.importorskip("fsspec")

DAY_S = 86_400.0
ROWS = 40
TASK = Task(kind=Kind.PROMPT, template="{{ q }}")


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(bucket, "CONNECT_S", 1.0)
    monkeypatch.setattr(bucket, "ATTEMPTS", 2)


@pytest.fixture
def place(server: str) -> str:
    """URL of a new bucket, without the server's address."""
    return f"s3://{make_bucket(server)}/team"


@pytest.fixture
def proxy(server: str) -> Iterator[Proxy]:
    with proxied(server) as found:
        yield found


@pytest.fixture
def data(place: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> str:
    """Place of the files of commands' stores: behind the proxy."""
    url = f"{place}?endpoint={proxy.address}"
    monkeypatch.setenv("CONSERVE_DATA", url)
    return url


@pytest.fixture
def remote(settings: Settings, data: str) -> Iterator[Store]:
    opened = Store.open(load({"home": settings.home, "data": data}, environ={}))
    yield opened
    opened.close()


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"q": [f"question {n}" for n in range(ROWS)]}), path)
    return path


@pytest.fixture
def job_id(data: str, rows: Path) -> str:
    """A job that has run to its end."""
    submitted = conserve("submit", str(rows), "--prompt", "{{ q }}")
    assert submitted.returncode == 0, submitted.stderr
    found = submitted.stdout.strip().splitlines()[-1]
    ran = conserve("run", "--endpoint", "fake:")
    assert ran.returncode == 0, ran.stderr
    return found


def names(store: Store) -> set[str]:
    """Objects of a store, below its own path."""
    assert isinstance(store.data, ObjectPath)
    return {entry.path.relative_to(store.data).as_posix() for entry in store.data.entries()}


def failing(status: int) -> Fault:
    return Fault(status=status)


def test_files_of_a_job_are_objects_and_nothing_of_it_is_in_the_home(remote: Store, job_id: str) -> None:
    assert {f"jobs/{job_id}/{name}" for name in ("job.json", "requests.parquet", "inputs.parquet")} < names(
        remote
    )
    assert sum(name.startswith(f"jobs/{job_id}/results/") for name in names(remote)) == 1
    assert not [path for path in (remote.home / "jobs").rglob("*") if path.is_file()]
    assert not list((remote.home / "sending").glob("*"))


def test_answers_come_from_the_bucket_also_without_the_setting(
    job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CONSERVE_DATA")
    answers = conserve("results", job_id, "--with-inputs", "--with-prompts")
    found = [json.loads(line) for line in answers.stdout.splitlines()]
    assert [row["row_index"] for row in found] == list(range(ROWS))
    assert [row["prompt"] for row in found] == [f"question {n}" for n in range(ROWS)]
    shown = conserve("show", job_id, "7")
    assert "question 7" in shown.stdout, shown.stderr


def test_sql_reads_all_views_and_nothing_else(job_id: str, place: str) -> None:
    counts = conserve(
        "sql",
        "--json",
        "select count(*) as n, count(distinct i.q) as questions, min(q.state) as state from results r "
        "join inputs i using (job_id, row_index) join requests q using (job_id, row_index)",
    )
    assert json.loads(counts.stdout) == {"n": ROWS, "questions": ROWS, "state": "succeeded"}, counts.stderr
    other = conserve("sql", f"select * from read_parquet('{place}/other.parquet')")
    assert other.returncode == 2, other.stdout


def test_sql_fetches_the_columns_of_a_query_alone(
    remote: Store, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import duckdb

    from conserve.store.sql.object_reader import add_objects

    assert isinstance(remote.data, ObjectPath)
    path, there = tmp_path / "wide.parquet", remote.data / "wide.parquet"
    blobs = pa.array([os.urandom(1024).hex() for _ in range(4096)])
    pq.write_table(pa.table({"n": range(4096), "blob": blobs}), path, row_group_size=1024)
    there.upload(path)
    fetched: list[int] = []
    reading = ObjectPath.open

    def counted(self: ObjectPath) -> object:
        file = reading(self)
        read_at = file.read_at
        monkeypatch.setattr(file, "read_at", lambda start, size: fetched.append(size) or read_at(start, size))
        return file

    monkeypatch.setattr(ObjectPath, "open", counted)
    with duckdb.connect(":memory:") as duck:
        add_objects(duck, remote.data.bucket)
        assert duck.sql(f"select sum(n) from read_parquet('{there}')").fetchall() == [(sum(range(4096)),)]
        assert sum(fetched) < path.stat().st_size // 10
        fetched.clear()
        asked = f"select length(blob) from read_parquet('{there}') where n = 3000"
        assert duck.sql(asked).fetchall() == [(2048,)]
        assert sum(fetched) < path.stat().st_size // 2


def test_damage_is_found_and_mended(remote: Store, job_id: str) -> None:
    assert conserve("check").returncode == 0
    assert isinstance(remote.data, ObjectPath)
    with remote.read() as tx:
        (shard,) = shards.files(tx, [job_id])
    (remote.data / shard.file).unlink()
    requests = layout.requests_file(remote.data, job_id)
    requests.write_bytes(requests.read_bytes()[:-1] + b"?")
    found = conserve("check")
    assert found.returncode == 1
    assert f"{shard.file} is missing" in found.stdout
    assert "requests.parquet is not what was written" in found.stdout
    left_out = conserve("sql", "select count(*) from results")
    assert "is missing" in left_out.stderr
    mended = conserve("check", "--repair")
    assert mended.returncode == 0, mended.stdout + mended.stderr
    assert conserve("run", "--endpoint", "fake:").returncode == 0
    assert len(conserve("results", job_id).stdout.splitlines()) == ROWS


def test_a_file_comes_back_from_the_trash_of_the_bucket(remote: Store, job_id: str) -> None:
    assert isinstance(remote.data, ObjectPath)
    with remote.read() as tx:
        (shard,) = shards.files(tx, [job_id])
    content = (remote.data / shard.file).read_bytes()
    trash.throw_away(remote.data, remote.data / shard.file, now=1e9)
    assert mending.mend_rows(remote, job_id, now=1e9) == [f"{shard.file} was found in the trash"]
    assert (remote.data / shard.file).read_bytes() == content


def test_removed_jobs_leave_no_object(remote: Store, job_id: str) -> None:
    add_job(remote, "empty")
    assert isinstance(remote.data, ObjectPath)
    lengths = {entry.path.relative_to(remote.data).as_posix(): entry.bytes for entry in remote.data.entries()}
    sizes = json.loads(conserve("store", "size", "--json").stdout)
    usage, empty = sizes["jobs"]
    assert usage["requests_bytes"] == lengths[f"jobs/{job_id}/requests.parquet"]
    assert usage["inputs_bytes"] == lengths[f"jobs/{job_id}/inputs.parquet"]
    assert usage["results_bytes"] == sum(n for name, n in lengths.items() if "/results/" in name) > 0
    assert usage["bytes"] == sum(lengths.values())
    assert {empty[name] for name in ("requests_bytes", "inputs_bytes", "results_bytes", "bytes")} == {0}
    assert sizes["total_bytes"] == sum(lengths.values()) + place_of(remote.home).size()
    assert conserve("rm", "empty", "--yes", "--force").returncode == 0
    removed = conserve("rm", job_id, "--yes")
    assert removed.returncode == 0, removed.stderr
    assert not names(remote)


def test_orphans_go_a_day_later_and_only_this_stores(
    remote: Store, job_id: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(remote.data, ObjectPath)
    kept = names(remote)
    (remote.data / "jobs" / job_id / "results" / "000-orphan.parquet").write_bytes(b"of a killed process")
    (remote.data / "jobs" / job_id / "deliveries" / "file-1.jsonl").write_bytes(b"of another")
    for name, mark in {
        "begun": marks.Mark(store_id=remote.id),
        "theirs": marks.Mark(store_id="another"),
        "newer": marks.Mark(store_id=remote.id, registered=True),
    }.items():
        place_of(remote.data / "jobs" / name).set_mark(mark)
        (remote.data / "jobs" / name / "requests.parquet").write_bytes(b"rows")
    (remote.data / "jobs" / "late" / "results" / "000-late.parquet").write_bytes(b"after a removal")
    kept |= {
        f"jobs/{name}/{file}" for name in ("theirs", "newer") for file in ("job.json", "requests.parquet")
    }
    monkeypatch.setattr(sweeping, "BETWEEN_S", 0.0)
    assert sweep(remote, now=time.time() + DAY_S / 2) == 0
    assert sweep(remote, now=time.time() + 2 * DAY_S) == 4
    assert {name for name in names(remote) if not name.startswith("trash/")} == kept
    assert len(trash.contents(remote.data)) == 4
    sweep(remote, now=time.time() + 12 * DAY_S)
    assert names(remote) == kept


def test_an_orphan_that_cannot_be_moved_stays_for_now_and_the_others_go(
    remote: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(remote.data, ObjectPath)
    for name in ("a", "b"):
        (remote.data / "jobs" / name / "results" / "000.parquet").write_bytes(b"after a removal")
    real = trash.throw_away

    def refuses(data: ObjectPath, path: ObjectPath, *, now: float) -> ObjectPath:
        if path.name == "a":
            raise StoreUnreachable("no answer")
        return real(data, path, now=now)

    monkeypatch.setattr(trash, "throw_away", refuses)
    assert sweep(remote, now=time.time() + 2 * DAY_S) == 1
    assert caplog.messages == [f"{remote.data}/jobs/a stays for now: no answer"]
    assert {name for name in names(remote) if name.startswith("jobs/")} == {"jobs/a/results/000.parquet"}


def test_unfinished_uploads_end(remote: Store, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3")
    assert isinstance(remote.data, ObjectPath)
    client, name = multipart.client_of(remote.data.bucket), remote.data.bucket.name
    for key in (f"team/{remote.id}/jobs/a/results/b.parquet", "team/another/jobs/a"):
        client.create_multipart_upload(Bucket=name, Key=key)
    # The server says of all uploads that they began in 2010.
    assert multipart.abort_older(remote.data, before=0.0) == 0
    assert multipart.abort_older(remote.data, before=time.time() + DAY_S) == 1
    left = client.list_multipart_uploads(Bucket=name)["Uploads"]
    assert [upload["Key"] for upload in left] == ["team/another/jobs/a"]
    monkeypatch.setattr(sweeping, "BETWEEN_S", 0.0)
    client.create_multipart_upload(Bucket=name, Key=f"team/{remote.id}/jobs/a")
    for now, uploads in ((1.2e9, 2), (time.time(), 1)):
        assert sweep(remote, now=now) == 0
        assert len(client.list_multipart_uploads(Bucket=name)["Uploads"]) == uploads


def test_a_bucket_out_of_reach_is_named_in_one_sentence(
    data: str, proxy: Proxy, rows: Path, place: str
) -> None:
    proxy.judge = lambda request: failing(503)
    refused = conserve("submit", str(rows), "--prompt", "{{ q }}")
    assert refused.returncode == 1
    assert f"{place} cannot be reached" in refused.stderr
    assert "HTTP 503" in refused.stderr or "slow down" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1, refused.stderr
    assert conserve("jobs", "--json").stdout.strip() == "[]"
    proxy.judge = lambda request: None
    assert conserve("submit", str(rows), "--prompt", "{{ q }}").returncode == 0


@pytest.mark.parametrize(
    "fault", [Fault(status=500), Fault(), Fault(status=500, passed_on=True), Fault(passed_on=True)]
)
def test_results_whose_upload_fails_stay_in_the_journal_and_are_neither_lost_nor_doubled(
    remote: Store, proxy: Proxy, rows: Path, fault: Fault
) -> None:
    submitted = submit(remote, str(rows), TASK)
    finish(remote, leased(remote, limit=ROWS))
    proxy.judge = lambda request: fault if "/results/" in request.path else None
    with pytest.raises(StoreUnreachable):
        shards.compact(remote, submitted.job_id, now=0.0)
    assert proxy.faults
    count = "select count(*) as n, count(distinct row_index) as rows from results"
    proxy.judge = lambda request: fault if request.method == "PUT" else None
    assert conserve("sql", "--csv", count).stdout.split() == ["n,rows", "40,40"]
    proxy.judge = lambda request: None
    assert shards.compact(remote, submitted.job_id, now=0.0) == ROWS
    assert conserve("sql", "--csv", count).stdout.split()[1] == "40,40"
    assert conserve("check").returncode == 0


def test_an_answer_that_is_cut_off_is_asked_for_again_or_reported(
    remote: Store, proxy: Proxy, job_id: str
) -> None:
    assert isinstance(remote.data, ObjectPath)
    path = layout.requests_file(remote.data, job_id)
    whole = path.read_bytes()
    first: list[Request] = []

    def cut_once(request: Request) -> Fault | None:
        if request.method == "GET" and not first:
            first.append(request)
            return Fault(cut_after=100)
        return None

    proxy.judge = cut_once
    assert path.read_bytes() == whole
    proxy.judge = lambda request: Fault(cut_after=100) if request.method == "GET" else None
    with pytest.raises(StoreUnreachable):
        path.read_bytes()


def test_a_failing_bucket_damages_nothing(proxy: Proxy, job_id: str) -> None:
    proxy.judge = lambda request: failing(500)
    for arguments in (
        ["check", "--repair"],
        ["rm", job_id, "--yes", "--force"],
        ["results", job_id],
        ["retry", job_id],
    ):
        failed = conserve(*arguments)
        assert failed.returncode in (0, 1), failed.stderr
    proxy.judge = lambda request: None
    assert conserve("check").returncode == 0
    assert len(conserve("results", job_id).stdout.splitlines()) == ROWS


def test_a_run_goes_on_once_the_bucket_is_back(
    data: str,
    proxy: Proxy,
    rows: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    submitted = conserve("submit", str(rows), "--prompt", "{{ q }}").stdout.split()[-1]
    begin, waits = Outage.begin, list[float]()

    def begun(self: Outage, error: StoreUnreachable) -> float:
        waits.append(begin(self, error))
        return 0.0

    monkeypatch.setattr(Outage, "begin", lambda self, error, **_: begun(self, error))
    proxy.judge = lambda request: failing(500) if submitted in request.path and not waits else None
    ran = conserve("run", "--endpoint", "fake:")
    assert ran.returncode == 0, ran.stderr
    assert "cannot be reached" in caplog.text
    assert "the store is back" in caplog.text
    assert len(conserve("results", submitted).stdout.splitlines()) == ROWS


def test_the_doctor_tries_the_bucket(data: str, proxy: Proxy, remote: Store, place: str) -> None:
    def files() -> list[dict[str, object]]:
        told = conserve("doctor", "--json", CONSERVE_ENDPOINT="fake:")
        return [one for one in json.loads(told.stdout) if one["name"] == "files"]

    well = files()
    assert all(one["ok"] for one in well), well
    assert "written, read and deleted" in str(well[0]["value"])
    assert not names(remote)
    proxy.judge = lambda request: failing(403) if request.method == "PUT" else None
    (ill,) = files()[:1]
    assert not ill["ok"]
    assert "AWS_ACCESS_KEY_ID" in str(ill["fix"])


def test_inputs_may_be_objects(place: str, data: str, rows: Path, proxy: Proxy, tmp_path: Path) -> None:
    folder = ObjectPath(Bucket.parse(data), "inputs")
    (folder / "day=1" / "a.parquet").upload(rows)
    (folder / "day=2" / "b.parquet").upload(rows)
    (tmp_path / "c.jsonl").write_text('{"q": "one"}\n{"q": "two"}\n')
    (folder / "c.jsonl").upload(tmp_path / "c.jsonl")
    endpoint = f"?endpoint={proxy.address}"
    for name, count in {"day=1/a.parquet": ROWS, "day=*": 2 * ROWS, "c.jsonl": 2}.items():
        submitted = conserve("submit", f"{folder}/{name}{endpoint}", "--prompt", "{{ q }}")
        assert submitted.returncode == 0, submitted.stderr
        job = json.loads(conserve("status", submitted.stdout.split()[-1], "--json").stdout)
        assert job["rows"] == count
    days = conserve(
        "sql", "--csv", "select day, count(*) from inputs where day is not null group by 1 order by 1"
    )
    assert days.stdout.split()[1:] == ["1,40", "2,40"], days.stderr
    missing = conserve("submit", f"{folder}/nothing.parquet{endpoint}", "--prompt", "{{ q }}")
    assert missing.returncode == 2
    assert "there is no object" in missing.stderr
    assert conserve("run", "--endpoint", "fake:").returncode == 0
    assert conserve("check").returncode == 0


def test_answers_may_become_an_object(job_id: str, place: str, proxy: Proxy, data: str) -> None:
    out = f"{place}/exports/answers.parquet?endpoint={proxy.address}"
    written = conserve("results", job_id, "-o", out, "--format", "parquet")
    assert written.returncode == 0, written.stderr
    there = ObjectPath(Bucket.parse(data), "exports/answers.parquet")
    assert pq.read_table(there.open()).num_rows == ROWS


@pytest.mark.parametrize("kind", ["dataset", "delta"])
def test_answers_may_become_a_table(
    job_id: str, place: str, proxy: Proxy, data: str, tmp_path: Path, kind: str, rows: Path
) -> None:
    if kind == "delta":
        pytest.importorskip("deltalake")
    run = process if kind == "delta" else conserve  # deltalake keeps Python's lock, which the proxy needs
    there, here = f"{place}/tables?endpoint={proxy.address}", str(tmp_path / "tables")
    for out in (there, there, here, here):  # the second export takes the place of the first
        written = run("results", job_id, "--format", kind, "-o", out)
        assert written.returncode == 0, written.stderr
    if kind == "dataset":
        folder = ObjectPath(Bucket.parse(data), f"tables/job_id={job_id}")
        parts = [entry.path for entry in folder.entries() if entry.path.name.endswith(".parquet")]
        assert sum(pq.read_metadata(part.open()).num_rows for part in parts) == ROWS
    second = conserve("submit", str(rows), "--prompt", "{{ q }}").stdout.split()[-1]
    assert conserve("run", "--endpoint", "fake:").returncode == 0
    assert conserve("results", second, "--format", kind, "-o", str(tmp_path / "tables")).returncode == 0
    table = read_back(kind, str(tmp_path / "tables"))
    assert table.num_rows == 2 * ROWS
    assert set(table["job_id"].to_pylist()) == {job_id, second}


def read_back(kind: str, folder: str) -> pa.Table:
    """A table as another program reads it."""
    if kind == "delta":
        from deltalake import DeltaTable

        return DeltaTable(folder).to_pyarrow_table()
    from pyarrow import dataset

    return dataset.dataset(folder, format="parquet", partitioning="hive").to_table()


def test_no_command_shows_or_keeps_a_key(data: str, proxy: Proxy, job_id: str, settings: Settings) -> None:
    secret = KEYS["AWS_SECRET_ACCESS_KEY"]
    said = [conserve(*words, CONSERVE_ENDPOINT="fake:") for words in (["doctor"], ["status"], ["check"])]
    proxy.judge = lambda request: failing(403)
    said += [conserve(*words) for words in (["results", job_id], ["check"], ["store", "size"])]
    for done in said:
        for word in (secret, KEYS["AWS_ACCESS_KEY_ID"]):
            assert word not in done.stdout + done.stderr
    for path in settings.home.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes()
