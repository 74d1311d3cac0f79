"""The command line as a user meets it: what goes where, exit codes, help."""

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from conserve.api.running import outcome
from conserve.cli.app import app
from conserve.cli.run import report
from conserve.cli.serve import harvester_command
from conserve.cli.status_report import retriable
from conserve.cli.suggestions import again, at_home, over_this_store
from conserve.config import load
from conserve.endpoints.fake import FakeEndpoint, Script
from conserve.jobs.harvest.harvester import Harvester
from conserve.store.books import catalog
from conserve.store.books.readings import read_jobs
from conserve.store.books.states import JobState, OnLate
from conserve.store.database.store import Store
from conserve.variables import GIVEN
from tests.commands import conserve, ended, process, until
from tests.conftest import StartForked, WriteInput

COMMANDS = list(typer.main.get_group(app).commands)
DOCS = Path(__file__).parents[2] / "docs"


def submit(path: Path, *arguments: str) -> str:
    done = conserve("submit", str(path), "--prompt", "{{ q }}", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_main_job_from_submit_to_sql(write_input: WriteInput, tmp_path: Path) -> None:
    """Two commands run in processes of their own, to import all that they need and to end with their output whole.

    So do the others in `test_demo`.
    """
    submitted = conserve("submit", str(write_input(q=["a", "b"], n=[1, 2])), "--prompt", "{{ q }}")
    assert submitted.returncode == 0, submitted.stderr
    job_id = submitted.stdout.strip()
    ran = conserve("run", "--endpoint", "fake:", "--json")
    assert ran.returncode == 0
    assert json.loads(ran.stdout)["jobs"] == {job_id: "completed"}
    status = json.loads(process("status", job_id, "--json").stdout)
    assert (status["state"], status["rows"], status["succeeded"], status["waiting"]) == ("completed", 2, 2, 0)
    assert [job["id"] for job in json.loads(conserve("jobs", "--json").stdout)] == [job_id]
    lines = process("results", job_id).stdout.splitlines()
    assert [json.loads(line)["row_index"] for line in lines] == [0, 1]
    out = tmp_path / "out.csv"
    assert conserve("results", "last", "-o", str(out), "--with-inputs").returncode == 0
    assert out.read_text().splitlines()[0].endswith(",q,n")
    openai = conserve("results", job_id, "--format", "openai").stdout.splitlines()
    assert json.loads(openai[0])["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    query = "select i.n, r.submitted_at from results r join inputs i using (job_id, row_index) order by n"
    assert conserve("sql", query).stdout.splitlines()[0].split() == ["n", "submitted_at"]
    assert json.loads(conserve("sql", "--json", query).stdout.splitlines()[1])["n"] == 2


def test_a_run_says_what_it_does_from_the_start_to_the_end(write_input: WriteInput) -> None:
    job_id = submit(write_input(q=["a", "b"]))
    said = conserve("run", "--endpoint", "fake:?request_ms=1").stderr.splitlines()
    assert said[0] == "starting the fake endpoint"
    assert said[-2] == f"{job_id}: completed, 2 of 2 rows done"
    assert said[-1].startswith("2 rows in ")
    assert all("rows, " in line for line in said[1:-2])


def test_a_run_says_how_many_answers_are_not_the_json_that_was_asked_for(write_input: WriteInput) -> None:
    submit(write_input(q=["a", "b"]), "--schema", '{"type": "object"}')
    done = conserve("run", "--endpoint", "fake:", "--json")
    assert done.returncode == 0
    assert "2 of 2 answers are not the JSON that was asked for" in done.stderr
    assert json.loads(done.stdout)["no_json"] == 2


def test_a_run_that_cannot_begin_says_nothing_but_why(write_input: WriteInput) -> None:
    submit(write_input(q=["a"]))
    refused = conserve("run", "--window", "2")
    assert refused.returncode == 2
    assert "--window is for a server; for the engine: conserve run -- --max-num-seqs N" in refused.stderr
    (said,) = conserve("run", "--endpoint", "ftp://server").stderr.splitlines()
    assert said.startswith("conserve: --endpoint takes")


def test_a_run_has_as_many_rows_in_flight_at_a_server_as_its_window(
    write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def make(*_: object, most_rows: int | None, **__: object) -> FakeEndpoint:
        made.append(most_rows)
        return FakeEndpoint(Script.from_url("fake:"))

    monkeypatch.setattr("conserve.cli.run.make_endpoint", make)
    submit(write_input(q=["a"]))
    assert conserve("run", "--endpoint", "fake:", "--window", "2").returncode == 0
    assert made == [2]


def test_failed_rows_exit_5_and_can_be_retried(write_input: WriteInput) -> None:
    job_id = submit(write_input(q=["a", "REJECT"]))
    ran = conserve("run", "--endpoint", "fake:")
    assert ran.returncode == 5
    assert f'why rows failed: conserve sql --job {job_id} "select' in ran.stderr
    assert f"then try them again with: conserve retry {job_id}\n" in ran.stderr
    (query,) = re.findall(r'conserve sql --job \S+ "(select .*)"', ran.stderr)
    why = conserve("sql", "--job", job_id, "--json", query)
    assert json.loads(why.stdout) == {"error": "scripted rejection", "rows": 1, "first": 1}
    back = conserve("retry", job_id)
    assert back.stdout == f"{job_id}: 1 failed row back in the queue\n"
    assert "run them with: conserve run" in back.stderr
    assert conserve("run", "--endpoint", "fake:?reject=NEVER").returncode == 0
    errors = [json.loads(line)["error"] for line in conserve("results", job_id).stdout.splitlines()]
    assert errors == [None, None]
    nothing = conserve("retry", job_id)
    assert (nothing.returncode, nothing.stdout) == (0, f"{job_id}: there is nothing to retry\n")
    assert "conserve run" not in nothing.stderr


def test_answers_of_a_job_that_is_not_done_come_with_the_command_that_goes_on(
    write_input: WriteInput,
) -> None:
    job_id = submit(write_input(q=["a"] * 2))
    so_far = f"job {job_id} is {{}}: 0 of 2 rows so far; go on with: conserve {{}} {job_id}\n"
    assert conserve("results", "last").stderr == so_far.format("queued", "run")
    conserve("pause", job_id)
    assert conserve("results", "last").stderr == so_far.format("paused", "resume")
    with closing(Store.open(load())) as store, store.write() as tx:
        tx.exec_driver_sql("update job set state = 'failed'")
    assert conserve("results", "last").stderr == so_far.format("failed", "resume")


def test_a_template_that_cannot_be_read_is_named_once(write_input: WriteInput, tmp_path: Path) -> None:
    rows, latin = str(write_input(q=["a"])), tmp_path / "latin.txt"
    latin.write_bytes("für {{ q }}".encode("latin-1"))
    for path, said in (
        ("nope.txt", "there is no file nope.txt with the template; check the path"),
        (tmp_path, f"cannot read the template {tmp_path}: Is a directory; check the path"),
        (latin, f"the template {latin} is not UTF-8; convert it"),
    ):
        done = conserve("submit", rows, "--prompt-file", str(path))
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_an_interrupted_run_names_the_command_that_goes_on(
    write_input: WriteInput, forked: StartForked
) -> None:
    job_id = submit(write_input(q=["a"] * 4))
    address = "fake:?token_ms=50&tokens=10000"
    running = forked("run", "--api-key", "geheim", "--endpoint", address)
    until(lambda: read_jobs(load(), now=time.time())[0].running > 0, running)
    assert conserve("results", "last").stderr == f"job {job_id} is running: 0 of 4 rows so far\n"
    running.send_signal(signal.SIGINT)
    code, _, stderr = ended(running)
    assert code == 130
    assert f"go on with: conserve run --endpoint '{address}'\n" in stderr


def test_a_run_recommends_no_retry_of_rows_that_would_fail_again(write_input: WriteInput) -> None:
    unrendered, failing = submit(write_input(q=["a", None])), submit(write_input(q=["REJECT", None]))
    ran = conserve("run", "--endpoint", "fake:")
    assert f"then try them again with: conserve retry {failing}\n" in ran.stderr
    assert f"--job {unrendered}" in ran.stderr
    alone = submit(write_input(q=["b", None]))
    assert "try them again" not in conserve("run", alone, "--endpoint", "fake:").stderr


@pytest.mark.parametrize("words", [("submit", "-", "--prompt", "{{ q }}"), ("sql", "-")])
def test_a_closed_standard_input_is_an_empty_one(words: tuple[str, ...]) -> None:
    command = f"{sys.executable} -m conserve {shlex.join(words)} <&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (("--max-tokens", "5", "--param", "max_tokens=7"), "max_tokens"),
        (
            ("--schema", '{"type": "object"}', "--param", 'response_format={"type": "text"}'),
            "response_format",
        ),
        (("--stop", "x", "--param", 'stop="abc"'), "stop"),
    ],
)
def test_a_field_that_is_given_twice_is_a_usage_error(
    write_input: WriteInput, flags: tuple[str, ...], name: str
) -> None:
    done = conserve("submit", str(write_input(q=["a"])), "--prompt", "{{ q }}", *flags)
    assert done.returncode == 2
    assert f"{name} is given twice, by a flag of its own and by --param; leave one out" in done.stderr


def test_status_recommends_a_retry_where_it_has_rows_to_take_up(
    store: Store, write_input: WriteInput
) -> None:
    def hinted(job_id: str) -> bool:
        return conserve("status", job_id).stdout.endswith(f" conserve retry {job_id}\n")

    unrendered = submit(write_input(q=["a", None]))
    failing = submit(write_input(q=["REJECT", None]))
    assert not hinted(unrendered)
    conserve("run", "--endpoint", "fake:")
    assert [job.failed for job in read_jobs(load(), now=time.time())] == [1, 2]
    assert (hinted(unrendered), hinted(failing)) == (False, True)
    assert "there is nothing to retry" in conserve("retry", unrendered).stdout
    late = submit(write_input(q=["a", "b"]))
    with store.write() as tx:
        catalog.set_deadline(tx, late, 1.0)
    conserve("run", late, "--endpoint", "fake:")
    assert hinted(late)
    (failed,) = read_jobs(load(), now=time.time(), only=[failing])
    assert retriable(load(), failed) == "failed rows"
    assert retriable(load(), replace(failed, state=JobState.CANCELLED)) is None, "retry refuses it"


def test_a_command_to_go_on_with_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["serve", "m", "--api-key", "a", "--hf-token=b", "--max-tokens", "8", "http://u:p@h:1/v1"]
    monkeypatch.setattr(sys, "argv", ["conserve", *words])
    assert again() == "conserve serve m --max-tokens 8 http://h:1/v1"
    assert harvester_command(load(), "http://h:1").environment[GIVEN] == again()
    monkeypatch.setenv(GIVEN, "conserve serve m")
    assert again() == "conserve serve m", "of the command that started this process"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann@db/x", "postgresql://ann@db/x"),
        ("postgresql://ann:p@ss@db:5432/x", "postgresql://ann:PASSWORD@db:5432/x"),
        ("postgresql://ann:p/ss@db/x", "postgresql://db/x"),
        ("postgresql://db/x?user=ann&password=p&a=b", "'postgresql://db/x?user=ann&password=PASSWORD&a=b'"),
        ("sqlite:////srv/a b.db", "'sqlite:////srv/a b.db'"),
    ],
)
def test_a_command_over_the_same_store_names_it_as_the_user_did(
    monkeypatch: pytest.MonkeyPatch, url: str, shown: str
) -> None:
    monkeypatch.setenv("CONSERVE_HOME", "/srv/it's")
    monkeypatch.delenv("CONSERVE_STORE", raising=False)
    assert over_this_store(None, "check") == """CONSERVE_HOME='/srv/it'"'"'s' conserve check"""
    monkeypatch.setenv("CONSERVE_STORE", url)
    assert over_this_store("b c", "check") == f"CONSERVE_STORE={shown} conserve --home 'b c' check"
    monkeypatch.delenv("CONSERVE_HOME")
    assert over_this_store(None, "check") == f"CONSERVE_STORE={shown} conserve check"


def test_commands_to_go_on_with_name_the_store_that_the_user_named(
    write_input: WriteInput, tmp_path: Path
) -> None:
    home = str(tmp_path / "my store")
    named = f"conserve --home '{home}'"
    rows = str(write_input(q=["a", None]))
    queued = conserve("--home", home, "submit", rows, "--prompt", "{{ q }}")
    job_id = queued.stdout.strip()
    assert f"; run them with: {named} run\n" in queued.stderr
    assert f"go on with: {named} run {job_id}\n" in conserve("--home", home, "results", job_id).stderr
    assert conserve(f"--home={home}", "pause", job_id).returncode == 0
    assert f"with: {named} resume {job_id}\n" in conserve("--home", home, "run", job_id).stderr
    assert f"; run: {named} jobs" in conserve("--home", home, "status", "nothing-like-it").stderr
    assert conserve("--home", home, "resume", job_id).returncode == 0
    assert f"failed: {named} sql --job" in conserve("--home", home, "run", "--endpoint", "fake:").stderr
    assert "--home" not in conserve("results", job_id, CONSERVE_HOME=home).stderr


@pytest.mark.parametrize(
    "words", [["check"], ["check", "--repair"], ["prune", "--yes"], ["store", "backup", "b"]]
)
def test_commands_on_all_that_a_store_holds_make_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = tmp_path / "tpyed"
    for named, place in (
        ({"CONSERVE_HOME": str(typed)}, typed),
        (
            {"CONSERVE_STORE": f"sqlite:///{typed}/x.db", "CONSERVE_HOME": str(typed)},
            f"sqlite:///{typed}/x.db",
        ),
    ):
        done = conserve(*words, **named)
        assert (done.returncode, f"there is no store in {place}; check" in done.stderr) == (1, True), done
    assert not typed.exists()
    (typed / "jobs").mkdir(parents=True)  # whose database is lost
    assert "there is no store" not in conserve("check", CONSERVE_HOME=str(typed)).stderr


def test_a_job_beside_the_queue_of_its_folder_is_warned_of(
    write_input: WriteInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell may lack the variable that the service has."""
    path = str(write_input(q=["a"]))
    words = ("submit", path, "--prompt", "{{ q }}")
    assert "warning" not in conserve(*words).stderr
    database = f"sqlite:///{tmp_path / 'team.db'}"
    assert "warning" not in conserve(*words, CONSERVE_STORE=database).stderr
    said = f"was in {database}; harvesters there do not take it: set CONSERVE_STORE"
    assert said in conserve(*words).stderr


@pytest.mark.parametrize("words", [["status"], ["jobs"]])
def test_a_command_says_whose_jobs_it_is_about_where_a_folder_and_a_database_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    folder, database = str(tmp_path / "work"), f"sqlite:///{tmp_path / 'team.db'}"
    said = (
        f"the jobs are those of {database}, which CONSERVE_STORE names; {folder} is the folder of their files"
    )
    assert "which CONSERVE_STORE names" not in conserve("--home", folder, *words).stderr
    monkeypatch.setenv("CONSERVE_STORE", database)
    assert said in conserve("--home", folder, *words).stderr
    assert "which CONSERVE_STORE names" not in conserve(*words).stderr
    assert said not in conserve("--home", folder, *words, **{GIVEN: "conserve serve m"}).stderr
    monkeypatch.delenv("CONSERVE_STORE")
    (tmp_path / "conserve.toml").write_text(f'store = "{database}"\n')
    monkeypatch.chdir(tmp_path)
    said = f"(for a store in that folder remove `store` from {tmp_path / 'conserve.toml'})"
    assert said in conserve("--home", folder, *words).stderr


@pytest.mark.parametrize(
    ("message", "at_that_home"),
    [
        ("no jobs; run: conserve jobs", "no jobs; run: conserve --home d jobs"),
        ("`conserve resume j`, or again", "`conserve --home d resume j`, or again"),
        ("conserve: conserve sql reads views", "conserve: conserve sql reads views"),
        ("make one: conserve --home NEW store restore b", "make one: conserve --home NEW store restore b"),
        ("conserve serve keeps running", "conserve serve keeps running"),
    ],
)
def test_only_commands_of_a_message_name_the_store(
    message: str, at_that_home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert at_home(message) == message
    monkeypatch.setattr(sys, "argv", ["conserve", "--home", "d", "submit", "--home"])
    assert at_home(message) == at_that_home


def test_a_run_that_was_stopped_before_its_start_was_over_says_so(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["conserve", "run"])
    done = outcome(Harvester(store, FakeEndpoint(Script())), load(), begun=0.0, interrupted=True)
    assert report(done, load(), as_json=False) == 130
    assert capsys.readouterr().err == "go on with: conserve run\nstopped before any row was sent\n"


def test_a_job_that_expires_in_a_run_names_its_retry(write_input: WriteInput, forked: StartForked) -> None:
    job_id = submit(write_input(q=["a"] * 4))
    running = forked("run", "--endpoint", "fake:?token_ms=50&tokens=10000")
    until(lambda: read_jobs(load(), now=time.time())[0].running > 0, running)
    with closing(Store.open(load())) as store, store.write() as tx:
        catalog.set_deadline(tx, job_id, time.time() - 1.0, OnLate.EXPIRE)
    _, _, stderr = ended(running)
    assert f"back with: conserve retry {job_id}\n" in stderr
    assert "go on with" not in stderr


def test_a_cancelled_job_exits_3(write_input: WriteInput, forked: StartForked) -> None:
    job_id = submit(write_input(q=["a"] * 4))
    running = forked("run", "--endpoint", "fake:?token_ms=50&tokens=10000")
    until(lambda: read_jobs(load(), now=time.time())[0].running > 0, running)
    assert conserve("cancel", job_id).stdout == f"{job_id}: cancelled\n"
    assert ended(running).returncode == 3


def test_a_job_that_is_removed_in_a_run_is_told_of(write_input: WriteInput, forked: StartForked) -> None:
    job_id = submit(write_input(q=["a"] * 4))
    running = forked("run", "--endpoint", "fake:?token_ms=50&tokens=10000", "--json")
    until(lambda: read_jobs(load(), now=time.time())[0].running > 0, running)
    assert conserve("rm", job_id, "--force", "--yes").returncode == 0
    code, told, said = ended(running)
    assert code == 3
    assert json.loads(told)["jobs"] == {job_id: "removed"}
    assert f"{job_id}: removed meanwhile, with its answers\n" in said


def test_rows_of_a_cancelled_job_wait_no_longer(write_input: WriteInput) -> None:
    job_id = submit(write_input(q=["a"] * 4))
    assert "4 waiting, 0 running" in conserve("status", job_id).stdout
    conserve("cancel", job_id)
    assert "4 cancelled, 0 running" in conserve("status", job_id).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["status", "nope"], 2, "no job 'nope'"),
        (["submit", "nofile.parquet", "--prompt", "x"], 2, "there is no file"),
        (["submit", "-", "--prompt", "x", "--messages", "y"], 2, "not both"),
        (["submit", "-", "--prompt", "x", "--schema", "{"], 2, "not JSON"),
        (["submit", "-", "--prompt", "x", "--param", "top_k"], 2, "KEY=JSON"),
        (["results", "x", "--format", "xml"], 2, "no format 'xml'"),
        (["results", "x", "--json", "--format", "delta"], 2, "leave --json or --format delta out"),
        (["sql", "drop table jobs"], 2, "only SELECT"),
        (["run", "--lease-s", "0"], 2, "at least 1 second"),
        (["run", "--utility", "1.5"], 2, "not 1.5; try: --utility 0.9"),
        (["harvest", "--utility", "nan"], 2, "not nan; try: --utility 0.9"),
        (["serve", "smollm2-demo", "--utility", "-0.1"], 2, "not -0.1; try: --utility 0.9"),
        (["frobnicate"], 2, "No such command"),
        (["run", "--frobnicate"], 2, "No such option"),
    ],
)
def test_a_mistake_is_a_sentence_on_stderr_and_an_exit_code(
    arguments: list[str], code: int, words: str
) -> None:
    done = conserve(*arguments, stdin='{"q": 1}\n')
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_job_suggests_the_nearest(write_input: WriteInput) -> None:
    job_id = submit(write_input(q=["a"]))
    assert f"did you mean {job_id}?" in conserve("status", job_id[:-1] + "_").stderr


def test_a_store_of_the_future_is_refused_by_every_command(write_input: WriteInput, tmp_path: Path) -> None:
    import sqlite3

    submit(write_input(q=["a"]))
    with sqlite3.connect(tmp_path / "home" / "conserve.db") as database:
        database.execute("update meta set value = '99' where key = 'version'")
    database.close()
    for command in (["status"], ["jobs"], ["run"], ["sql", "select 1"], ["submit", "-", "--prompt", "x"]):
        done = conserve(*command, stdin='{"q": 1}\n')
        assert (done.returncode, done.stdout) == (1, "")
        assert "this store has version 99" in done.stderr


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor loads nothing, which would take seconds."""
    monkeypatch.setattr(
        "conserve.engine.vllm.launching.loading.WORDS", ("-c", 'print(\'{"device": "cpu"}\')')
    )


@pytest.mark.usefixtures("no_library")
def test_nothing_is_coloured_off_a_terminal(write_input: WriteInput) -> None:
    submit(write_input(q=["a"]))
    for command in (["status"], ["jobs"], ["doctor"], ["run", "--endpoint", "fake:"], ["--help"]):
        done = conserve(*command, FORCE_COLOR="", TERM="xterm-256color")
        assert "\x1b" not in done.stdout + done.stderr


def test_libraries_that_look_for_a_terminal_at_import_find_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "")
    monkeypatch.setenv("TERM", "xterm-256color")
    for command, code in ((["--help"], 0), (["frobnicate"], 2)):
        done = process(*command)
        assert done.returncode == code
        assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_an_example_and_the_docs_name_the_command(name: str) -> None:
    shown = conserve("help", name).stdout
    assert shown.splitlines()[0] == "Example:"
    assert f"conserve {name}" in shown.splitlines()[1]
    assert shown == conserve(name, "--help").stdout
    page = (DOCS / "reference" / "commands.md").read_text()
    group = typer.main.get_group(app).commands[name]
    for words in [[name], *([name, part] for part in getattr(group, "commands", ()))]:
        assert f"Usage: conserve {' '.join(words)} " in page
        assert conserve("help", *words).stdout == conserve(*words, "--help").stdout


def test_help_names_the_command_that_there_is_not() -> None:
    assert "there is no command 'eval rnu'; run: conserve help eval" in conserve("help", "eval", "rnu").stderr
    assert "there is no command 'run x'; run: conserve help run" in conserve("help", "run", "x").stderr


@pytest.mark.parametrize(
    ("words", "verb"),
    [
        ("fleet", "list"),
        ("fleet --json", "list"),
        ("fleet drain gpu-3", "drain"),
        ("profile", "measure"),
        ("profile smollm2-demo", "measure"),
        ("profile --seed 1", "measure"),
        ("profile show", "show"),
    ],
)
def test_a_group_with_a_default_verb_may_be_called_without_it(words: str, verb: str) -> None:
    name, *rest = words.split()
    command = typer.main.get_group(app).commands[name]
    context = typer.Context(command)
    command.parse_args(context, rest)
    assert [*context._protected_args, *context.args] == [*([] if verb in rest else [verb]), *rest]


def test_a_mistyped_verb_is_no_argument_of_a_default_verb_that_takes_none() -> None:
    assert "No such command 'drian'" in conserve("fleet", "drian", "gpu-3").stderr


@pytest.mark.usefixtures("no_library")
def test_doctor_names_the_fix(tmp_path: Path) -> None:
    done = conserve("doctor", "--json", CONSERVE_MODEL=str(tmp_path / "nowhere"))
    assert done.returncode == 1
    (bad,) = [finding for finding in json.loads(done.stdout) if not finding["ok"]]
    assert "CONSERVE_MODEL" in bad["fix"]


def completed(words: str) -> list[str]:
    """Completions that Bash would offer for the last of these words."""
    position = str(len(words.split(" ")) - 1)
    offered = conserve(_CONSERVE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=position)
    return offered.stdout.split()


def test_the_shell_completes_commands_and_jobs(write_input: WriteInput) -> None:
    job_id = submit(write_input(q=["a"]), "--name", "evening")
    assert completed("conserve st") == ["status", "store"]
    assert completed("conserve rm eve") == [job_id]
    assert completed("conserve check eve") == [job_id]
    assert completed("conserve status eve") == [job_id]
    assert completed("conserve cancel eve") == [job_id]


@pytest.mark.parametrize(
    "command",
    [
        ("jobs",),
        ("jobs", "--json"),
        ("status",),
        ("status", "last"),
        ("run", "--endpoint", "fake:"),
        ("run", "--dry-run"),
        ("harvest", "--endpoint", "http://127.0.0.1:9"),
        ("forecast",),
        ("top", "--once"),
        ("check",),
        ("submit", "rows.csv", "--prompt", "{{ q }}"),
        ("results", "last"),
        ("sql", "select 1 from jobs"),
        ("eval", "list"),
        ("eval", "report", "last"),
        ("profile", "show"),
    ],
    ids=" ".join,
)
def test_a_home_that_is_no_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("q\na\n")
    for home in ("rows.csv", "rows.csv/below"):
        done = conserve(*command, CONSERVE_HOME=home)
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        said = f"{tmp_path / home} cannot be used: it is no folder, or lies in none; check --home or CONSERVE_HOME"
        assert said in done.stderr


def test_a_home_that_is_yet_to_be_made_is_an_empty_store(tmp_path: Path) -> None:
    home = str(tmp_path / "not" / "yet")
    for command in ("jobs", "status"):
        done = conserve(command, CONSERVE_HOME=home)
        assert (done.returncode, done.stdout) == (0, "")
        assert done.stderr.startswith(f"no jobs yet in {home}; queue one with: conserve submit ")
    for command in ("status", "results", "retry"):
        done = conserve(command, "last", CONSERVE_HOME=home)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("conserve: there is no job 'last', for there are no jobs yet in ")
        assert f"{home}" in done.stderr
        assert "; queue one with: conserve submit " in done.stderr
