"""A user's commands over a bucket, killed around every upload: nothing is lost, doubled or left behind."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from conserve.config import load
from conserve.store.database.store import Store
from conserve.store.files.objects import ObjectPath
from tests import commands
from tests.acceptance import aimed
from tests.acceptance.aimed import Shot
from tests.acceptance.kill_harness import Harness
from tests.commands import conserve
from tests.s3 import KEYS, make_bucket, s3_server

pytest.importorskip("moto.server")
pytest.importorskip("fsspec")

UPLOAD = "conserve.store.files.objects:ObjectPath.upload"
PROMPTS = [f"q{n}" for n in range(60)]
SCRIPT = "tokens=20&token_ms=10&capacity=8"  # long enough for several commits
SHOTS = (
    Shot(at="conserve.store.books.journal:count", call=2, after=True),  # some rows answered
    Shot(at=UPLOAD),  # all rows answered, and their shard not sent
    Shot(at=UPLOAD, after=True),  # sent, and no record names it
)


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with s3_server() as server:
        yield f"s3://{make_bucket(server)}/team?endpoint=http://{server}"


def test_every_row_is_there_once_after_kills_around_each_upload(data: str, tmp_path: Path) -> None:
    at = tmp_path / "home"
    store = Store.open(load({"home": at, "data": data}, environ={}))
    assert isinstance(store.data, ObjectPath)
    jobs = [Harness(at, PROMPTS, script=SCRIPT, seed=seed) for seed in range(len(SHOTS))]
    submitting = ["submit", str(tmp_path / "input-0.parquet"), "--prompt", "{{ q }}", "--name", "killed"]
    for job, shot in zip(jobs, SHOTS, strict=True):
        job.submit()
        job.kill(shot)
    aim = aimed.command([Shot(at=UPLOAD, call=3, after=True)], *submitting)
    killed = commands.ended(commands.start(["-m", "tests.acceptance.aimed", *aim], env=jobs[0].env))
    assert killed.returncode == -signal.SIGKILL, killed
    jobs.append(Harness(at, PROMPTS, script=jobs[0].script, seed=len(SHOTS)))
    jobs[-1].submit()
    assert jobs[-1].finish() == 0
    for job in jobs:
        job.check()

    def ran(*words: str) -> str:
        done = conserve("--home", str(at), *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    rows = [json.loads(line) for line in ran("results", jobs[0].job_id, "--with-inputs").splitlines()]
    assert [(row["row_index"], row["q"]) for row in rows] == list(enumerate(PROMPTS))
    counted = ran("sql", "--csv", "select count(*), count(distinct (job_id, row_index)) from results")
    assert counted.split()[-1] == "240,240"
    ran("check")
    ran("rm", *(job.job_id for job in jobs), "--yes")
    left = {entry.path.relative_to(store.data).parts[1] for entry in store.data.entries()}
    assert [name.rpartition("-")[0] for name in left] == ["killed"], "a sweep takes it a day later"
    store.close()
