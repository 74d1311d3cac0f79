"""Files of a store are truncated, zeroed, flipped and removed: the job is named, the rest works, and is mended."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from conserve.store.files import layout, marks
from tests.commands import Done, conserve
from tests.tiers import in_full

from .damaging import WAYS, hurt
from .table import report

pytestmark = pytest.mark.breakage

PLACES = 4  # of each kind of file, in one round: one for each way
ROWS = 25


Row = tuple[int, str | None, str | None]  # row index, text, error type
Rows = dict[str, list[Row]]  # by job


class Jobs(NamedTuple):
    """A store with four jobs, as a folder to copy, and what their rows should come to."""

    folder: Path
    expected: Rows


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a round, so that each is bounded."""
    if "number" in metafunc.fixturenames:
        seed, rounds = (int(metafunc.config.getoption(f"--break-{name}")) for name in ("seed", "rounds"))
        metafunc.parametrize("number", range(seed, seed + rounds))


def submit(folder: Path, name: str, **options: str) -> str:
    path = folder / f"{name}.jsonl"
    rows = [{"q": f"{name} {n}" + (" REJECT" if n % 8 == 5 else "")} for n in range(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [word for option in options.items() for word in (f"--{option[0]}", option[1])]
    done = conserve("submit", str(path), "--prompt", "{{ q }}", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def run(*jobs: str) -> Done:
    return sound(conserve("run", *jobs, "--endpoint", "fake:"))


def sound(done: Done) -> Done:
    """A command that ended as a user may see one end."""
    assert "Traceback" not in done.stderr, done.stderr
    return done


def results() -> Rows:
    """The rows of all jobs as far as they can be read, without what differs from run to run."""
    query = "select job_id, row_index, text, error_type from results order by job_id, row_index"
    found: Rows = {}
    for line in sound(conserve("sql", "--json", query)).stdout.splitlines():
        row = json.loads(line)
        found.setdefault(row["job_id"], []).append((row["row_index"], row["text"], row["error_type"]))
    return found


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Two jobs that are done, one half done and one queued."""
    at = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONSERVE_FAKE", "1")
        patch.setenv("CONSERVE_HOME", str(at / "home"))
        done = [submit(at, "one"), submit(at, "two", order="random:7")]
        open_ones = [submit(at, "half"), submit(at, "queued")]
        run(*done)
        with patch.context() as kept_in_journal:
            kept_in_journal.setattr("conserve.store.books.shards.compact", lambda *_, **__: 0)
            run(open_ones[0])
        shutil.copytree(at / "home", at / "other")
        patch.setenv("CONSERVE_HOME", str(at / "other"))
        run()
        expected = results()
    assert [len(rows) for rows in expected.values()] == [ROWS] * 4
    return Jobs(at / "home", expected)


@pytest.fixture
def jobs(kept: Jobs, tmp_path: Path) -> Jobs:
    """A copy of the store, which a test may damage."""
    return Jobs(tmp_path / "home", kept.expected)


def kinds_of_files(folder: Path) -> dict[str, list[Path]]:
    """Files of the jobs, by what they are."""
    jobs = folder / "jobs"
    return {
        "shard": sorted(jobs.glob("*/results/*.parquet")),
        "requests": sorted(jobs.glob(f"*/{layout.REQUESTS}")),
        "inputs": sorted(jobs.glob(f"*/{layout.INPUTS}")),
        "mark": sorted(jobs.glob(f"*/{marks.MARK}")),
    }


@pytest.fixture
def fresh(jobs: Jobs, kept: Jobs) -> Callable[[], None]:
    """Puts the store back as it was."""

    def fresh() -> None:
        shutil.rmtree(jobs.folder, ignore_errors=True)
        shutil.copytree(kept.folder, jobs.folder)

    return fresh


def cost(expected: Rows) -> tuple[int, int]:
    """Rows that are lost or wrong, and rows that are doubled, over all jobs."""
    found = results()
    rows = [(job_id, *row) for job_id, of in found.items() for row in of]
    lost = sum((job_id, *row) not in rows for job_id, of in expected.items() for row in of)
    return lost, len(rows) - len({row[:2] for row in rows})


@pytest.mark.parametrize("kind", ["shard", "requests", *in_full("inputs", "mark")])
def test_a_damaged_file_costs_its_own_job_alone_and_nothing_once_it_is_mended(
    jobs: Jobs, fresh: Callable[[], None], kind: str, number: int
) -> None:
    dice = random.Random(f"{number} {kind}")
    lost = doubled = tried = 0
    for place in range(PLACES):
        fresh()
        path = dice.choice(kinds_of_files(jobs.folder)[kind])
        owner = path.relative_to(jobs.folder / "jobs").parts[0]
        where = hurt(path, WAYS[place % len(WAYS)], dice)
        if where == "nowhere":
            continue
        tried += 1
        found = json.loads(sound(conserve("check", "--json")).stdout)
        assert {damage["job_id"] for damage in found["damages"]} == {owner}, (path, where)
        run()
        others = {job_id: rows for job_id, rows in results().items() if job_id != owner}
        assert others == {job_id: rows for job_id, rows in jobs.expected.items() if job_id != owner}, where
        mended = sound(conserve("check", "--repair"))
        assert mended.returncode == 0, (path, where, mended)
        run()
        costs = cost(jobs.expected)
        assert costs == (0, 0), (path, where)
        lost, doubled = lost + costs[0], doubled + costs[1]
    report(f"damaged: {kind}", tried=tried, lost=lost, doubled=doubled)


def test_a_damaged_database_is_mended_and_does_not_lie(
    jobs: Jobs, fresh: Callable[[], None], number: int
) -> None:
    """Whatever a flipped bit hits: a sentence, or answers that are right."""
    dice = random.Random(f"{number} database")
    path = jobs.folder / "conserve.db"
    lost = doubled = tried = 0
    for place in range(PLACES):
        fresh()
        where = hurt(path, WAYS[place % len(WAYS)], dice)
        if where == "nowhere":
            continue
        tried += 1
        for words in (["status"], ["sql", "select * from jobs"]):
            sound(conserve(*words))
        mended = sound(conserve("check", "--repair"))
        if "upgrade ConServe" in mended.stderr:
            continue  # its version was hit: nothing tells that from a store of the future
        assert mended.returncode == 0, (where, mended)
        run()
        costs = cost(jobs.expected)
        assert costs == (0, 0), where
        lost, doubled = lost + costs[0], doubled + costs[1]
    report("damaged: database", tried=tried, lost=lost, doubled=doubled)
