"""Standard output that is closed or full: every command that prints, with real pipes and devices."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple
from unittest import mock

import pytest

from conserve.cli import app, stdout
from conserve.config import load
from conserve.store.books.readings import read_jobs
from conserve.store.books.withdraw import withdraw
from conserve.store.database.store import Store
from conserve.store.files import job_folders, layout
from conserve.store.files.marks import Mark
from conserve.store.files.place import place_of
from tests.commands import HANGS_S, conserve, ended, process
from tests.conftest import StartForked, WriteInput
from tests.store_rows import leased
from tests.tiers import in_full
from tests.unit.test_cli import submit

FULL = Path("/dev/full")
LONG = "select repeat('x', 100) as a from range(100000)"  # more than a pipe holds
PRINTING = [
    ["--help"],
    ["--version"],
    ["help", "submit"],
    ["submit", "--help"],
    ["status"],
    ["status", "last", "--json"],
    ["--home", "elsewhere", "status", "--json"],
    ["jobs"],
    ["jobs", "--json"],
    ["results", "input"],
    ["results", "input", "--format", "csv"],
    ["results", "input", "--format", "parquet"],
    ["results", "input", "--format", "openai"],
    ["sql", "select 1"],
    ["sql", "--json", LONG],
    ["sql", "--csv", LONG],
    ["show", "input", "0"],
    ["show", "input", "0", "--json"],
    ["pause", "third"],
    ["run", "--endpoint", "fake:", "--json"],
    ["retry", "input"],
    ["doctor"],
    ["doctor", "--json"],
    ["profile", "show", "llama-3.1-8b-h100"],
]


class Ended(NamedTuple):
    """End of a command, and its output."""

    returncode: int
    stderr: str


def into(
    stdout: "int | IO[bytes]", words: Sequence[str], stderr: "int | IO[bytes]" = subprocess.PIPE
) -> Ended:
    """Run a command with this as its standard output."""
    command = [sys.executable, "-m", "conserve", *words]
    with subprocess.Popen(
        command, stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL, text=True
    ) as running:
        said = running.stderr.read() if running.stderr is not None else ""
        return Ended(running.wait(HANGS_S), said)


@contextlib.contextmanager
def closed_pipe() -> Iterator[int]:
    """The writing end of a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.fixture
def job(write_input: WriteInput, monkeypatch: pytest.MonkeyPatch) -> str:
    # A doctor that loads the library would take seconds, of four doctors here.
    monkeypatch.setattr("conserve.engine.vllm.launching.loading.WORDS", ("-c", "print('device: cpu')"))
    job_id = submit(write_input(q=["a", "b"]))
    assert conserve("run", "--endpoint", "fake:").returncode == 0
    submit(write_input("third.parquet", q=["a"]))
    submit(write_input("second.parquet", q=["a"]))
    return job_id


def printing_to(descriptor: int, words: Sequence[str]) -> Ended:
    """Run a command in this process, with this as its standard output."""
    stream = stdout.text_stream(stdout.Stdout(descriptor, "w", closefd=False), None, line_buffering=False)
    said = io.StringIO()
    arguments = mock.patch.object(sys, "argv", ["conserve", *words])
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(said), arguments:
        return Ended(stdout.run_flushed(app.main), said.getvalue())


def test_a_reader_that_leaves_ends_every_command_quietly(job: str) -> None:
    for words in PRINTING:
        with closed_pipe() as pipe:
            ended = printing_to(pipe, words)
        assert ended.returncode == 141, (words, ended)
        assert not ended.stderr or words[0] in ("run", "retry", "doctor"), "which speak on stderr anyway"


def test_a_reader_of_a_named_pipe_that_leaves_ends_the_command_quietly_too(job: str, tmp_path: Path) -> None:
    pipe = tmp_path / "answers.csv"
    os.mkfifo(pipe)

    def leave() -> None:
        with pipe.open("rb", buffering=0) as reader:
            reader.read(1)

    reading = threading.Thread(target=leave)
    reading.start()
    with FULL.open("wb") as nothing:
        ended = printing_to(nothing.fileno(), ["sql", LONG, "-o", str(pipe)])
    reading.join()
    assert ended == (141, "")


def test_a_dash_is_standard_output(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["results", "input", "--format", "csv"], ["sql", "--csv", "select 1 as a"]):
        with_dash, without = conserve(*words, "-o", "-"), conserve(*words)
        assert with_dash == without
        assert with_dash.returncode == 0
    assert not Path("-").exists()


def test_letters_that_a_locale_lacks_are_spelled_out() -> None:
    latin = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = process("sql", "select '5 \u20ac' as a", env=latin)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["a", "5", "\\u20ac"], "")


def test_a_full_disk_behind_standard_output_is_a_sentence_of_every_command(job: str) -> None:
    for words in PRINTING:
        with FULL.open("wb") as full:
            ended = printing_to(full.fileno(), words)
        assert ended.returncode == 1, (words, ended)
        last = ended.stderr.splitlines()[-1]
        assert last.startswith("conserve: standard output cannot be written (No space left on device)")


def test_processes_end_as_the_shell_expects(job: str) -> None:
    """`test_head_gets_its_lines` shows how a long answer ends."""
    with closed_pipe() as pipe:
        assert into(pipe, ["status"]) == (141, "")
    with FULL.open("wb") as full:
        assert_full(into(full, ["status"]))


def test_a_long_answer_ends_at_a_full_disk(job: str, forked: StartForked) -> None:
    done = ended(forked("sql", "--json", LONG, output=FULL, thawed=True))
    assert_full(Ended(done.returncode, done.stderr))


def assert_full(ended: Ended) -> None:
    """A command ended in one sentence about a full disk."""
    assert ended.returncode == 1
    assert ended.stderr.startswith("conserve: standard output cannot be written (No space left on device)")
    assert ended.stderr.count("\n") == 1


def test_head_gets_its_lines(job: str) -> None:
    command = f'{sys.executable} -m conserve sql --json "{LONG}" | head -n 2; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    *lines, status = done.stdout.splitlines()
    assert [len(json.loads(line)["a"]) for line in lines] == [100, 100]
    assert (status, done.stderr) == ("141", "")


@pytest.mark.parametrize("words", [["status"], *in_full(["sql", "select 1"])])
def test_a_closed_standard_output_is_a_sentence(words: list[str], job: str) -> None:
    command = f"{sys.executable} -m conserve {' '.join(repr(word) for word in words)} >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("conserve: standard output cannot be written (Bad file descriptor)")


def test_no_file_takes_the_place_of_a_closed_stream(job: str) -> None:
    """Printed lines must not go into the store, whose files are the next to be opened."""
    command = f"{sys.executable} -m conserve sql 'select 1' <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], check=False).returncode == 1
    assert conserve("status", job).returncode == 0


@pytest.mark.parametrize(("words", "code"), [(["run", "--endpoint", "fake:"], 0), (["nonsense"], 2)])
def test_a_standard_error_that_is_gone_changes_no_exit_code(words: list[str], code: int, job: str) -> None:
    with closed_pipe() as pipe:
        assert into(subprocess.DEVNULL, words, stderr=pipe).returncode == code
    assert conserve("status", "last", "--json").stdout.count('"state": "completed"') == (code == 0)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_job_whose_id_cannot_be_printed_is_withdrawn(flags: list[str], write_input: WriteInput) -> None:
    words = ["submit", str(write_input(q=["a"])), "--prompt", "{{ q }}", *flags]
    with closed_pipe() as pipe:
        ended = printing_to(pipe, words)
    assert ended.returncode == 1
    assert "its reader has gone); job input-" in ended.stderr
    assert ended.stderr.endswith(" was withdrawn\n")
    assert "queued" not in ended.stderr
    with FULL.open("wb") as full:
        ended = printing_to(full.fileno(), words)
    assert ended.returncode == 1
    assert "(No space left on device); job input-" in ended.stderr
    settings = load()
    assert read_jobs(settings, now=0.0) == []
    assert not list((settings.home / "jobs").iterdir())
    assert conserve(*words).returncode == 0


@pytest.mark.full
def test_submit_into_a_closed_pipe_leaves_no_job(write_input: WriteInput) -> None:
    with closed_pipe() as pipe:
        ended = into(pipe, ["submit", str(write_input(q=["a"])), "--prompt", "{{ q }}"])
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert read_jobs(load(), now=0.0) == []


@pytest.fixture
def store() -> Iterator[Store]:
    with contextlib.closing(Store.open(load())) as opened:
        yield opened


def test_a_job_that_runs_already_is_not_withdrawn(write_input: WriteInput, store: Store) -> None:
    job_id = submit(write_input(q=["a"]))
    leased(store)
    assert not withdraw(store, job_id)
    assert [job.id for job in read_jobs(load(), now=0.0)] == [job_id]
    assert layout.requests_file(store.home, job_id).is_file()


@pytest.mark.parametrize("folder", ["there", "gone"])
def test_a_job_is_withdrawn_alone_with_all_its_files(
    write_input: WriteInput, store: Store, folder: str
) -> None:
    job_id, other = (submit(write_input(f"{name}.parquet", q=["a"])) for name in ("one", "other"))
    if folder == "gone":
        shutil.rmtree(layout.job_folder(store.home, job_id))
    assert withdraw(store, job_id)
    assert [job.id for job in read_jobs(load(), now=0.0)] == [other]
    assert [path.name for path in layout.jobs_folder(store.home).iterdir()] == [other]
    assert not withdraw(store, job_id), "it is gone"


def test_a_job_whose_withdrawal_a_crash_ended_does_not_come_back(
    write_input: WriteInput, store: Store
) -> None:
    class Crash(Exception):
        pass

    job_id = submit(write_input(q=["a"]))
    with mock.patch.object(job_folders, "discard", side_effect=Crash), pytest.raises(Crash):
        withdraw(store, job_id)
    assert read_jobs(load(), now=0.0) == []
    assert place_of(layout.job_folder(store.home, job_id)).mark() == Mark(store_id=store.id, registered=False)
