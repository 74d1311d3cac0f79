"""Three real HTTP servers behind one queue: one is killed, one is drained and replaced, one joins."""

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from conserve.config import load
from conserve.store.books.readings import read_jobs
from tests.acceptance.aimed import command
from tests.acceptance.forks import Forked, Forks
from tests.acceptance.scripted_server import ScriptedServer
from tests.commands import conserve, ended, process, start, until
from tests.conftest import WriteInput


@pytest.fixture
def servers() -> Iterator[list[ScriptedServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(ScriptedServer()) for _ in range(3)]


def submit(path: Path) -> str:
    done = conserve("submit", str(path), "--prompt", "{{ q }}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def rows_done() -> int:
    return sum(reading.done for reading in read_jobs(load(), now=time.time()))


def answered_once(prompts: Sequence[str]) -> bool:
    """True if each row has one result of its own."""
    done = conserve("sql", "--json", "select row_index, error from results order by 1")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return found == [{"row_index": n, "error": None} for n in range(len(prompts))]


def flags(servers: Sequence[ScriptedServer]) -> list[str]:
    return list(itertools.chain.from_iterable(("--endpoint", server.url) for server in servers))


def harvest(forks: Forks, output: Path, options: Sequence[str]) -> Forked:
    """Start a harvester that ends with the queue, and writes to a file."""
    words = command([], "harvest", *options, "--until-empty")
    return forks.start(words, env=os.environ, errors=output.with_suffix(".errors"), output=output)


def test_one_of_three_servers_is_killed_and_no_row_notices(
    servers: list[ScriptedServer], write_input: WriteInput, tmp_path: Path, forks: Forks
) -> None:
    prompts = [f"row {n}" for n in range(150)]
    submit(write_input(q=prompts))
    for server in servers:
        server.script.tokens, server.script.pause_at = 40, 20
    running = harvest(forks, tmp_path / "said", [*flags(servers), "--json"])
    until(lambda: all(server.paused == 16 for server in servers), running)
    servers[1].down()
    until(lambda: "its rows go elsewhere" in running.errors.read_text(), running)
    for server in servers:
        server.script.pause_at = None
    code, stdout, stderr = ended(running)
    assert code == 0, stderr
    assert json.loads(stdout)["succeeded"] == len(prompts)
    assert answered_once(prompts)
    assert f"{servers[1].url} does not answer" in stderr or f"at {servers[1].url}" in stderr
    assert "its rows go elsewhere" in stderr
    assert servers[0].continued + servers[2].continued, "its rows continue from their tokens"


@pytest.mark.full
def test_the_list_in_a_file_is_followed_and_a_drained_server_is_left(
    servers: list[ScriptedServer], write_input: WriteInput, tmp_path: Path
) -> None:
    prompts = [f"row {n}" for n in range(600)]
    submit(write_input(q=prompts))
    for server in servers:
        server.script.pause_at = 4
    listed = tmp_path / "servers"
    listed.write_text(f"{servers[0].url}\n")
    running = start(["-m", "conserve", "harvest", "--endpoints", f"file://{listed}"])
    until(lambda: servers[0].in_flight == 16, running)
    listed.write_text(f"{servers[0].url}\n{servers[1].url}  # joins\n")
    until(lambda: servers[1].in_flight == 16, running)
    drained = process("fleet", "drain", servers[0].url.removeprefix("http://"), "--wait")
    assert drained.returncode == 0, drained.stderr
    assert "no row is in flight there" in drained.stderr
    found = {one["url"]: one for one in json.loads(process("fleet", "--json").stdout)}
    assert found[servers[0].url]["state"] == "drained"
    assert found[servers[1].url]["state"] == "serving"
    assert found[servers[1].url]["rows_in_flight"] == 16
    servers[0].down()
    assert process("fleet", "undrain", servers[0].url).returncode == 0
    servers[0].up()
    until(lambda: servers[0].in_flight == 16, running)
    for server in servers:
        server.script.pause_at = None
    until(lambda: rows_done() == len(prompts), running)
    running.terminate()
    code, _, stderr = ended(running)
    assert code == 0, stderr
    assert "Traceback" not in stderr
    assert answered_once(prompts)


def test_two_harvesters_over_three_servers(
    servers: list[ScriptedServer], write_input: WriteInput, tmp_path: Path, forks: Forks
) -> None:
    prompts = [f"row {n}" for n in range(160)]
    submit(write_input(q=prompts))
    both = [harvest(forks, tmp_path / f"said-{number}", flags(servers)) for number in range(2)]
    for running in both:
        code, _, stderr = ended(running)
        assert code == 0, stderr
    assert answered_once(prompts)
    texts = Counter(request.text for server in servers for request in server.requests)
    assert set(texts.values()) == {1}
