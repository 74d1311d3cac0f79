"""A full disk, at every write in turn: one sentence, nothing lost, and all goes on once there is room again."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from conserve.config import load
from conserve.store.books import shards
from conserve.store.books.readings import read_jobs
from conserve.store.database.store import Store
from conserve.store.files import trash
from tests.acceptance import aimed
from tests.acceptance.aimed import Shot
from tests.acceptance.forks import Forks
from tests.commands import Done, conserve, ended
from tests.tiers import in_full

from .full_disk import PAGE, Disk, mounted
from .table import report

pytestmark = pytest.mark.breakage

DISK_BYTES = 3 << 20
ROWS = 30
STEP = 7  # pages; so many rounds try each amount of room
EVERY_TENTH = [n for n in range(ROWS) if n % 10 == 3]


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """A small disk with a store on it."""
    with mounted(tmp_path / "disk", DISK_BYTES) as disk:
        monkeypatch.setenv("CONSERVE_HOME", str(disk.folder / "home"))
        yield disk


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """An input elsewhere; every tenth row will fail."""
    return written(tmp_path / "input.jsonl")


def written(path: Path) -> Path:
    """Write the rows to a file."""
    rows = [{"q": f"row {n}" + (" REJECT" if n in EVERY_TENTH else "")} for n in range(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    """A small disk with a job that is done."""
    folder = tmp_path_factory.mktemp("finished")
    with mounted(folder / "disk", DISK_BYTES) as disk:
        place = {"CONSERVE_HOME": str(disk.folder / "home"), "CONSERVE_FAKE": "1"}
        words = ("submit", str(written(folder / "input.jsonl")), "--prompt", "{{ q }}")
        assert conserve(*words, **place).returncode == 0
        assert conserve("run", "--endpoint", "fake:", **place).returncode == 5
        yield disk


def submit(lines: Path) -> Done:
    return conserve("submit", str(lines), "--prompt", "{{ q }}")


def run(**script: object) -> Done:
    query = "&".join(f"{name}={value}" for name, value in script.items())
    return conserve("run", "--endpoint", f"fake:?{query}")


def is_one_sentence(done: Done) -> bool:
    """True if a command that could not write says just that, and the next command."""
    assert "Traceback" not in done.stderr, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("conserve: ")]
    assert len(said) == 1, done.stderr
    assert "no space left" in said[0], done.stderr
    return done.returncode == 1


def row_indexes(job_id: str) -> list[int]:
    done = conserve("results", job_id)
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["row_index"] for line in done.stdout.splitlines()]


def whole() -> bool:
    """True if nothing is damaged."""
    done = conserve("check")
    assert done.returncode == 0, done
    return True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a round, so that each is bounded."""
    if "number" in metafunc.fixturenames:
        seed, rounds = (int(metafunc.config.getoption(f"--break-{name}")) for name in ("seed", "rounds"))
        metafunc.parametrize("number", range(seed, seed + rounds))


def at_every_write(disk: Disk, number: int, attempt: Callable[[], Done]) -> int:
    """Attempt it with ever more room, until it has enough; returns how often the disk was full.

    Each write that needs another page is the one that fails, in one round or another.
    """
    for tried, pages in enumerate(range(number % STEP, DISK_BYTES // PAGE, STEP)):
        disk.fill(pages * PAGE)
        done = attempt()
        disk.empty()
        if done.returncode != 1:
            assert whole()
            return tried
        assert is_one_sentence(done)
    raise AssertionError("it never had enough room")


def test_submit_leaves_nothing_behind(disk: Disk, lines: Path, number: int) -> None:
    conserve("jobs")
    Store.open(load()).close()

    def attempt() -> Done:
        before = len(read_jobs(load(), now=0.0))
        done = submit(lines)
        if done.returncode:
            disk.empty()
            assert len(read_jobs(load(), now=0.0)) == before
            folders = list((disk.folder / "home" / "jobs").glob("*"))
            assert folders == [], "no folder without a job"
        return done

    full = at_every_write(disk, number, attempt)
    (job_id,) = [job.id for job in read_jobs(load(), now=0.0)]
    assert run().returncode == 5
    found = row_indexes(job_id)
    report(
        "submit on a full disk", tried=full, lost=ROWS - len(set(found)), doubled=len(found) - len(set(found))
    )


def test_run_loses_nothing_that_was_committed(
    disk: Disk, lines: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claims, results, tokens that are saved and shards; each try goes on where the last one stopped."""
    monkeypatch.setattr(shards, "SHARD_ROWS", 8)
    job_id = submit(lines).stdout.strip()
    done_before = 0

    def attempt() -> Done:
        nonlocal done_before
        done = run(token_ms=0, tokens=200)
        (job,) = read_jobs(load(), now=0.0)
        assert job.done >= done_before, "what was committed stays"
        done_before = job.done
        return done

    full = at_every_write(disk, number, attempt)
    found = row_indexes(job_id)
    assert whole()
    report(
        "run on a full disk", tried=full, lost=ROWS - len(set(found)), doubled=len(found) - len(set(found))
    )


@pytest.mark.parametrize("verb", ["pause", "cancel", "retry", "rm"])
def test_a_change_is_made_as_a_whole_or_not_at_all(disk: Disk, lines: Path, number: int, verb: str) -> None:
    job_id = submit(lines).stdout.strip()
    if verb in ("retry", "rm"):
        run()
    words = [verb, job_id, *(["--yes"] if verb == "rm" else [])]
    full = at_every_write(disk, number, lambda: conserve(*words))
    jobs = read_jobs(load(), now=0.0)
    if verb == "rm":
        assert jobs == []
        found = list(range(ROWS))
    else:
        conserve("resume", job_id)
        run()
        found = row_indexes(job_id)
        assert verb == "cancel" or len(found) == ROWS
    lost = 0 if verb == "cancel" else ROWS - len(set(found))
    report(f"{verb} on a full disk", tried=full + 1, lost=lost, doubled=len(found) - len(set(found)))


def test_results_as_a_file_are_there_whole_or_not_at_all(disk: Disk, lines: Path, number: int) -> None:
    job_id = submit(lines).stdout.strip()
    run()
    out = disk.folder / "answers.parquet"

    def attempt() -> Done:
        done = conserve("results", job_id, "-o", str(out))
        assert out.exists() == (done.returncode == 0)
        assert [path.name for path in disk.folder.iterdir() if "answers" in path.name] == (
            [out.name] if out.exists() else []
        )
        return done

    full = at_every_write(disk, number, attempt)
    report("results into a full disk", tried=full, lost=0, doubled=0)


def test_repairs_are_made_as_a_whole_or_not_at_all(disk: Disk, lines: Path, number: int) -> None:
    """The next try mends what one could not."""
    job_id = submit(lines).stdout.strip()
    run()
    home = disk.folder / "home"
    (home / "jobs" / job_id / "requests.parquet").unlink()
    for file in (home / "jobs" / job_id / "results").iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    tried = at_every_write(disk, number, lambda: conserve("check", "--repair"))
    assert run().returncode == 5
    found = row_indexes(job_id)
    report(
        "check --repair on a full disk", tried=tried, lost=ROWS - len(set(found)), doubled=len(found) - ROWS
    )


READERS = (
    ["status"],
    ["jobs"],
    ["status", "last"],
    ["results", "last"],
    ["results", "last", "--with-inputs", "--format", "csv"],
    ["sql", "select count(*) from results join inputs using (job_id, row_index)"],
    ["check"],
    ["store", "size"],
)


@pytest.mark.parametrize("words", READERS, ids=" ".join)
def test_what_only_reads_works_with_no_byte_free(
    finished: Disk, monkeypatch: pytest.MonkeyPatch, words: Sequence[str]
) -> None:
    """Finished, and half done after a crash: with and without the files that a write-ahead log has beside it."""
    disk = finished
    monkeypatch.setenv("CONSERVE_HOME", str(disk.folder / "home"))
    expected = conserve(*words)
    assert expected.returncode == 0, expected.stderr
    disk.fill()
    assert disk.free_bytes == 0
    for _ in range(2):
        done = conserve(*words)
        assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr
    disk.empty()
    assert whole()


def test_reading_a_log_that_a_crash_left_works_with_no_byte_free(
    disk: Disk, lines: Path, forks: Forks
) -> None:
    """Rows of the log are there; the index is built in memory."""
    job_id = submit(lines).stdout.strip()
    crash = aimed.command([Shot(at="conserve.store.books.shards:compact")], "run", "--endpoint", "fake:")
    crashed = forks.start(crash, env=os.environ, errors=disk.folder / "errors")
    assert ended(crashed).returncode == -signal.SIGKILL
    log = disk.folder / "home" / "conserve.db-wal"
    assert log.stat().st_size > 0
    (disk.folder / "home" / "conserve.db-shm").unlink()
    (before,) = read_jobs(load(), now=4e9)
    assert before.done > 0
    disk.fill()
    status = conserve("status", job_id, "--json")
    assert status.returncode == 0, status.stderr
    assert json.loads(status.stdout)["succeeded"] == before.succeeded
    assert len(row_indexes(job_id)) == before.done
    disk.empty()
    run()
    assert len(row_indexes(job_id)) == ROWS


def test_removing_makes_room_on_a_full_disk(disk: Disk, lines: Path) -> None:
    """The trash goes first, which needs none."""
    submit(lines)
    run()
    home = disk.folder / "home"
    (home / "jobs" / "junk").write_bytes(bytes(300_000))
    trash.throw_away(home, home / "jobs" / "junk", now=1.0)
    disk.fill()
    done = conserve("prune", "--yes")
    assert done.returncode == 0, done.stderr
    assert disk.free_bytes >= 300_000
    disk.empty()
    assert whole()


@pytest.mark.parametrize("limit", [1 << 12, *in_full(1 << 16)])
def test_a_limit_on_the_size_of_files_is_a_full_disk_too(
    tmp_path: Path, lines: Path, forks: Forks, limit: int
) -> None:
    """The limit is that of a process that any user may start."""
    Store.open(load()).close()
    job_id = submit(lines).stdout.strip()

    also = {"tests.acceptance.privations:let_no_file_grow_beyond": str(limit)}

    def limited(*words: str) -> Done:
        aim, errors = aimed.command([], *words, also=also), tmp_path / f"errors of {words[0]}"
        return ended(forks.start(aim, env=os.environ, errors=errors))

    for words in (["submit", str(lines), "--prompt", "{{ q }}"], ["run", job_id, "--endpoint", "fake:"]):
        done = limited(*words)
        assert done.returncode in (0, 5) or is_one_sentence(done)
    assert whole()
    run()
    found = row_indexes(job_id)
    report(
        "files of limited size", tried=2, lost=ROWS - len(set(found)), doubled=len(found) - len(set(found))
    )
