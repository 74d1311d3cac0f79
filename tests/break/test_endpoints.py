"""Endpoints that answer oddly as often as not: every row ends once, and no good answer is lost."""

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from conserve.endpoints.fake import request_text
from conserve.jobs.harvest import harvester as harvest
from conserve.jobs.harvest import hold, retry, write_behind
from tests.commands import Done, conserve
from tests.conftest import WriteInput
from tests.tiers import in_full

from .certificates import ELSEWHERE, self_signed, server_context
from .odd_server import ENDLESS, OddServer
from .table import report

ROWS = 30
LIMITS = {"CONSERVE_MAX_ANSWER_MIB": "16"}
SCHEMA = json.dumps({"type": "object"})

pytestmark = pytest.mark.breakage


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(retry, "LONGEST_BACKOFF_S", 0.05)
    monkeypatch.setattr(hold, "LONGEST_BACKOFF_S", 0.05)
    monkeypatch.setattr(harvest, "IDLE_S", 0.02)
    monkeypatch.setattr(write_behind, "FLUSH_S", 0.05)


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    shown = [record for record in caplog.get_records("call") if record.levelno >= logging.WARNING]
    assert not any(record.exc_info for record in shown)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a round, so that each is bounded."""
    if "number" in metafunc.fixturenames:
        seed, rounds = (int(metafunc.config.getoption(f"--break-{name}")) for name in ("seed", "rounds"))
        metafunc.parametrize("number", range(seed, seed + rounds))


COMMANDS = pytest.mark.parametrize(
    ("command", "coserves"),
    [(("run",), False), *in_full((("harvest", "--until-empty"), True))],
    ids=["plain", "co-serving"],
)


@COMMANDS
def test_every_row_ends_once_however_odd_the_answers_are(
    write_input: WriteInput, tmp_path: Path, number: int, command: Sequence[str], coserves: bool
) -> None:
    name = "a co-serving server" if coserves else "a plain server"
    with OddServer(seed=number) as server:
        server.script.coserves = coserves
        jobs = {
            submit(write_input, f"row {{}} of {number}"): f"row {{}} of {number}",
            submit(write_input, f"{{}} as JSON, {number}", "--schema", SCHEMA): f"{{}} as JSON, {number}",
        }
        drain(server, command)
        found = {job_id: results(job_id) for job_id in jobs}
        for job_id, rows in found.items():
            check(server, jobs[job_id], rows)
            read_in_every_way(job_id, tmp_path)
        failed = sum(row["error"] is not None for rows in found.values() for row in rows)
        again(server, jobs, failed)
        everything = [(job_id, row["row_index"]) for job_id, rows in found.items() for row in rows]
        report(
            f"odd answers of {name}",
            tried=sum(server.odd.values()),
            lost=len(jobs) * ROWS - len(set(everything)),
            doubled=len(everything) - len(set(everything)),
        )


@COMMANDS
def test_a_row_whose_answers_do_not_end_fails_by_time(
    write_input: WriteInput, command: Sequence[str], coserves: bool
) -> None:
    with OddServer(always=ENDLESS) as server:
        server.script.coserves = coserves
        # A row that is streamed and brings no new token has waited for live requests, and waits on.
        prompt, flags = ("{} as JSON", ["--schema", SCHEMA]) if coserves else ("row {}", [])
        job_id = submit(write_input, prompt, *flags)
        done = quiet(*command, "--endpoint", server.url, "--max-attempts", "2", CONSERVE_MAX_ANSWER_S="0.5")
        assert done.returncode == 5, done.stderr
        rows = results(job_id)
        assert {(row["error_type"], row["text"]) for row in rows} == {("endpoint_fault", None)}
        assert all("(max_answer_s)" in row["error"] for row in rows)
        server.always, server.good = None, True
        quiet("retry", job_id)
        assert quiet("run", "--endpoint", server.url).returncode == 0
        check(server, prompt, results(job_id))
        distinct = len({row["row_index"] for row in rows})
        report(
            "answers without an end",
            tried=server.odd[ENDLESS],
            lost=ROWS - distinct,
            doubled=len(rows) - distinct,
        )


def submit(write_input: WriteInput, prompt: str, *flags: str) -> str:
    path = write_input(f"{abs(hash(prompt))}.parquet", q=[prompt.format(n) for n in range(ROWS)])
    done = conserve("submit", str(path), "--prompt", "{{ q }}", *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def drain(server: OddServer, command: Sequence[str]) -> None:
    """Run until the queue is empty; only a wrong address ends a run before."""
    while True:
        redirects = server.odd["redirect"]
        done = quiet(*command, "--endpoint", server.url, "--max-attempts", "3", **LIMITS)
        if done.returncode != 1:
            assert done.returncode in (0, 5), done.stderr
            return
        assert server.odd["redirect"] > redirects, done.stderr
        # A second time if the harvester waited, with that sentence, before it gave up; progress has it too.
        said = [line for line in done.stderr.splitlines() if "--endpoint" in line and " rows, " not in line]
        assert 1 <= len(said) <= 2, done.stderr


def quiet(*arguments: str, **variables: str) -> Done:
    """A command that shows no traceback."""
    done = conserve(*arguments, **variables)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def results(job_id: str) -> list[dict[str, Any]]:
    done = quiet("results", job_id)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def check(server: OddServer, prompt: str, rows: Sequence[dict[str, Any]]) -> None:
    """Good answers are kept as they came; rows without one have an error that names its type."""
    for row in rows:
        asked = request_text({"messages": [{"role": "user", "content": prompt.format(row["row_index"])}]})
        if row["error_type"] is None:
            assert row["text"] == server.good_text(asked)
            assert row["model"] == "served"
        else:
            assert (row["error_type"], row["text"]) == ("endpoint_fault", None)
            assert server.is_hopeless(asked), row


def read_in_every_way(job_id: str, folder: Path) -> None:
    """All readers answer, and they agree."""
    for form in ("parquet", "csv", "jsonl", "openai"):
        done = quiet("results", job_id, "--format", form, "-o", str(folder / f"{job_id}.{form}"))
        assert done.returncode == 0, done.stderr
    counted = "select count(*) as n, count(distinct row_index) as k, count(json) as j from results"
    done = quiet("sql", "--json", "--job", job_id, counted)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["n"], answer["k"]) == (ROWS, ROWS)


def again(server: OddServer, jobs: dict[str, str], failed: int) -> None:
    """Failed rows are answered once the server has come to its senses, and then nothing is left."""
    server.good = True
    put_back = 0
    for job_id in jobs:
        rows = quiet("retry", job_id).stdout.rpartition(": ")[2].split()[0]
        put_back += int(rows) if rows.isdigit() else 0  # "there is none" of a job without failed rows
    assert put_back == failed
    assert quiet("run", "--endpoint", server.url).returncode == 0
    for job_id, prompt in jobs.items():
        rows = results(job_id)
        assert [row["row_index"] for row in rows] == list(range(ROWS))
        assert all(row["error_type"] is None for row in rows)
        check(server, prompt, rows)
    assert "nothing to run" in quiet("run", "--endpoint", server.url).stderr


@pytest.mark.parametrize("command", [("run",), ("harvest", "--until-empty")], ids=["run", "harvest"])
def test_a_certificate_that_is_refused_blames_no_row(
    write_input: WriteInput, tmp_path: Path, command: Sequence[str]
) -> None:
    good = self_signed(tmp_path / "good.pem")
    expired = self_signed(tmp_path / "expired.pem", expired=True)
    another = self_signed(tmp_path / "another.pem", of=ELSEWHERE)
    job_id = submit(write_input, "row {}")
    tries = [(good, None, "self-signed"), (expired, expired, "expired"), (another, another, "not valid for")]
    for certificate, trusted, why in tries:
        with OddServer(good=True, tls=server_context(certificate)) as server:
            trust = {"SSL_CERT_FILE": str(trusted)} if trusted else {}
            done = quiet(*command, "--endpoint", server.url, **trust)
            assert done.returncode == 1
            assert done.stderr.count("certificate of https://") == 1, done.stderr
            assert why in done.stderr
            assert not server.requests
    assert results(job_id) == []
    with OddServer(good=True, tls=server_context(good)) as server:
        assert quiet(*command, "--endpoint", server.url, SSL_CERT_FILE=str(good)).returncode == 0
        rows = results(job_id)
        check(server, "row {}", rows)
    answered = [row["row_index"] for row in rows if row["error_type"] is None]
    lost, doubled = ROWS - len(set(answered)), len(rows) - len(set(answered))
    report("certificates that are refused", tried=len(tries), lost=lost, doubled=doubled)
