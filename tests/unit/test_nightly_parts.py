"""Parts of a night: means taken apart, schedules, the signed webhook."""

import hashlib
import hmac
import json
import re
import threading
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve import owners
from conserve.api.servers import STOCK, Unreported
from conserve.cli import evaluation_setup
from conserve.config import load
from conserve.errors import ConserveError, JobRefused, QueryError
from conserve.evals.plan import Reports
from conserve.evals.plan_file import plan_of
from conserve.evals.records import LiveLatencies
from conserve.nightly import evaluating, served_jobs
from conserve.nightly.evaluation_lock import end, held
from conserve.nightly.publishing import SIGNATURE, post
from conserve.nightly.redacted import address_of, flags_of, host_of, plan_text_of
from conserve.nightly.running import Asking
from conserve.nightly.schedule import (
    Schedule,
    absent_at_night,
    crontab_line,
    install_crontab,
    install_units,
    service,
    timer,
)
from conserve.nightly.served_jobs import worst
from conserve.store.files import nights
from conserve.store.sql.per_row import by_row
from tests import commands, nightly_files
from tests.server_reports import report

RESULTS = (
    "(values (0, 'yes it is', 'yes'), (1, 'no', 'yes'), (2, null, 'no')) results(row_index, text, answer)"
)


@pytest.mark.parametrize(
    "mean",
    [
        f"select avg(text ilike '%' || answer || '%') from {RESULTS}",
        f"with r as (from {RESULTS}) select avg(case when text = answer then 1 else 0 end) as exact from r;",
        f"select mean(length(text)) as longer, avg(1) as one from {RESULTS} where row_index < 2",
    ],
)
def test_a_mean_taken_apart_has_the_same_mean(mean: str) -> None:
    whole = duckdb.execute(numbers(mean)).fetchone()
    rows = duckdb.execute(by_row(mean).select)
    assert rows.description is not None
    assert rows.description[0][0] == "row_index"
    columns = list(zip(*rows.fetchall(), strict=True))[1:]
    found = [[value for value in column if value is not None] for column in columns]
    assert tuple(sum(values) / len(values) for values in found) == whole


def numbers(mean: str) -> str:
    """The mean as DuckDB takes it, which has none of truths."""
    return mean.replace("text ilike '%' || answer || '%'", "(text ilike '%' || answer || '%')::int")


@pytest.mark.parametrize(
    "select",
    [
        f"select row_index, text = answer as exact from {RESULTS}",
        f"select results.row_index, 1 as one from {RESULTS}",
        "select n as row_index, 1 as one from range(3) t(n)",
        f"select * from {RESULTS}",
        f"select row_index, 1 as one from {RESULTS} union all select 9, 0",
    ],
)
def test_scores_by_row_stay_as_they_are(select: str) -> None:
    assert by_row(select) == (select, False)


@pytest.mark.parametrize(
    "wrong",
    [
        "select 1",
        "select sum(1) from x",
        "select avg(a), max(a) from x",
        "select avg(a) over () from x",
        "select row_index.a from x row_index",
        "select avg(a) from x group by b",
        "select avg(distinct a) from x",
        "drop table x",
        "selec",
        "",
    ],
)
def test_any_other_select_is_refused(wrong: str) -> None:
    with pytest.raises(QueryError):
        by_row(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        "select avg(a) from x limit 1",
        "select avg(a) from x limit 50%",
        "select avg(a) from x offset 1",
        "select distinct avg(a) from x",
        "select avg(a) from x having avg(a) > 0",
        "select avg(a) from x qualify row_number() over () = 1",
        "select avg(a) from x using sample 3",
    ],
)
def test_a_mean_that_would_choose_rows_is_refused(wrong: str) -> None:
    with pytest.raises(QueryError, match="takes no LIMIT"):
        by_row(wrong)


def test_a_mean_in_an_order_or_over_chosen_rows_is_taken() -> None:
    by_row(f"select avg(text = answer) from {RESULTS} order by 1")
    by_row(f"select avg(text = answer) from (select * from {RESULTS} limit 2)")


NIGHT = Schedule(
    name="small",
    file=Path("/srv/my eval/100%.toml"),
    home=Path("/srv/store"),
    hour=1,
    minute=5,
    command=("/opt/bin/conserve",),
)


def test_a_crontab_line_survives_blanks_and_percent_signs() -> None:
    line = crontab_line(NIGHT)
    assert line.startswith("5 1 * * * cd '/srv/my eval' && /opt/bin/conserve --home /srv/store eval run ")
    assert "100%" not in line.replace(r"\%", "")
    assert line.endswith("2>&1")


def test_units_survive_blanks_and_percent_signs() -> None:
    assert 'eval run "/srv/my eval/100%%.toml"' in service(NIGHT)
    assert "OnCalendar=*-*-* 01:05:00" in timer(NIGHT)


def test_installing_twice_leaves_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "table"
    table.write_text("1 2 3 4 5 other\n")
    script = tmp_path / "crontab"
    script.write_text(f'#!/bin/sh\nif [ "$1" = -l ]; then cat {table}; else cat > {table}; fi\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    install_crontab(NIGHT)
    install_crontab(NIGHT)
    assert table.read_text().splitlines() == [
        "1 2 3 4 5 other",
        f"{crontab_line(NIGHT)} {NIGHT.mark}",
    ]


def test_lines_of_other_files_stay_whatever_their_evaluations_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(NIGHT, file=Path("/srv/b/100%.toml"))
    table = tmp_path / "table"
    table.write_text(f"{crontab_line(other)} {other.mark}\n{crontab_line(NIGHT)} {NIGHT.mark}\n")
    script = tmp_path / "crontab"
    script.write_text(f'#!/bin/sh\nif [ "$1" = -l ]; then cat {table}; else cat > {table}; fi\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    lines = table.read_text().splitlines()
    install_crontab(NIGHT)
    assert table.read_text().splitlines() == lines
    install_crontab(other)
    assert table.read_text().splitlines() == lines[::-1]
    assert other.unit != NIGHT.unit


@pytest.mark.parametrize(("said", "kept"), [("no crontab for me", False), ("permission denied", True)])
def test_only_a_crontab_that_is_not_there_is_empty(
    said: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table"
    table.write_text("1 2 3 4 5 other\n")
    script = tmp_path / "crontab"
    script.write_text(f'#!/bin/sh\nif [ "$1" = -l ]; then echo {said} >&2; exit 1; fi; cat > {table}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(ConserveError, match=said) if kept else nullcontext():
        install_crontab(NIGHT)
    assert ("other" in table.read_text()) is kept


def test_lines_of_a_crontab_stay_byte_for_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "table"
    table.write_bytes(b"# caf\xe9 \xc3\xa9\n")
    script = tmp_path / "crontab"
    script.write_text(
        f'#!/bin/sh\nif [ "$1" = -l ]; then cat {table}; else cat > {table}.new; mv {table}.new {table}; fi\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    install_crontab(NIGHT)
    assert table.read_bytes().startswith(b"# caf\xe9 \xc3\xa9\n")


@pytest.mark.parametrize("linger", ["yes", "no"])
def test_units_are_written_and_started(linger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    for name, said in (("systemctl", ""), ("loginctl", f"Linger={linger}")):
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\necho "$@" >> {calls}\necho {said}\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    units = tmp_path / "units"
    installed = install_units(NIGHT, units)
    assert (units / f"{NIGHT.unit}.service").read_text() == service(NIGHT)
    assert f"enable --now {NIGHT.unit}.timer" in calls.read_text()
    assert ("loginctl enable-linger" in installed) is (linger == "no")


@pytest.mark.parametrize("fails", ["daemon-reload", "enable"])
@pytest.mark.parametrize("earlier", [None, "an earlier unit"])
def test_units_that_cannot_be_started_leave_the_files_as_before_and_are_printed(
    fails: str, earlier: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "systemctl"
    script.write_text(f'#!/bin/sh\n[ "$2" != {fails} ] || {{ echo no bus >&2; exit 1; }}\n')
    script.chmod(0o755)
    units = tmp_path / ".config" / "systemd" / "user"
    units.mkdir(parents=True)
    file = nightly_files.written(tmp_path)
    unit = replace(NIGHT, file=file).unit
    names = (f"{unit}.service", f"{unit}.timer")
    for name in names if earlier else ():
        (units / name).write_text(earlier or "")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    done = commands.conserve(
        "eval", "schedule", str(file), "--at", "01:30", "--install", "systemd", HOME=str(tmp_path)
    )
    assert done.returncode == 1
    assert "copy the printed lines instead" in done.stderr
    assert "OnCalendar=*-*-* 01:30:00" in done.stdout
    assert {path.name: path.read_text() for path in units.iterdir()} == (
        dict.fromkeys(names, earlier) if earlier else {}
    )


def test_schedule_prints_both_ways(tmp_path: Path) -> None:
    file = nightly_files.written(tmp_path)
    done = commands.conserve("eval", "schedule", str(file), "--at", "23:59")
    assert done.returncode == 0, done.stderr
    assert "59 23 * * *" in done.stdout
    assert "OnCalendar=*-*-* 23:59:00" in done.stdout
    assert commands.conserve("eval", "schedule", str(file), "--at", "24:00").returncode == 2


def test_variables_that_a_night_will_lack_are_named_without_their_values(tmp_path: Path) -> None:
    file = nightly_files.written(tmp_path)
    hook = 'webhook = "http://127.0.0.1:9"\nsecret_variable = "HOOK_KEY"\n'
    file.write_text(f"{file.read_text()}\n[reports]\n{hook}")
    given = {
        "CONSERVE_STORE": f"sqlite:///{tmp_path}/hidden.db",
        "CONSERVE_API_KEY": "",
        "HOOK_KEY": "hidden",
    }
    done = commands.conserve("eval", "schedule", str(file), **given)
    named = done.stderr.partition(":")[2].partition(": set here, and not at night")[0]
    assert {"CONSERVE_STORE", "HOOK_KEY"} <= set(named.strip().split(", "))
    assert not {"CONSERVE_HOME", "CONSERVE_API_KEY"} & set(named.strip().split(", "))
    assert "hidden" not in done.stdout + done.stderr
    assert absent_at_night({"PYTHONPATH": "x", "PATH": "y", "CONSERVE_HOME": "z"}, None) == ["PYTHONPATH"]


def test_what_a_hub_a_bucket_a_proxy_and_a_gpu_are_told_by_is_named_too() -> None:
    names = [
        "AWS_PROFILE",
        "CUDA_VISIBLE_DEVICES",
        "HF_HOME",
        "HF_TOKEN",
        "VLLM_USE_V1",
        "https_proxy",
        "NO_PROXY",
    ]
    assert absent_at_night(dict.fromkeys(names, "x"), None) == sorted(names)


def test_the_settings_that_the_night_does_not_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evals").mkdir()
    file = nightly_files.written(tmp_path / "evals")
    here, there = tmp_path / "here" / "conserve.toml", file.parent / "conserve.toml"
    here.parent.mkdir()
    monkeypatch.chdir(here.parent)

    def said() -> str:
        done = commands.conserve("eval", "schedule", str(file), HOME=str(tmp_path))
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "conserve.toml" not in said()
    here.write_text("")
    begins = f"the night begins in {file.parent}"
    assert f"{begins}: it does not read {here}; write what it needs to {there}" in said()
    there.write_text("")
    assert f"{begins}: it does not read {here}, but {there}\n" in said()
    here.unlink()
    assert f"{begins}: it reads {there}, which is not read here" in said()
    monkeypatch.chdir(file.parent)
    assert "conserve.toml" not in said()


def test_a_bounded_night_is_stopped_and_then_killed(tmp_path: Path) -> None:
    bounded = replace(NIGHT, within_s=5400)
    assert " && timeout --kill-after=120 5400 /opt/bin/conserve --home " in crontab_line(bounded)
    assert "\nTimeoutStartSec=5400\nTimeoutStopSec=120\n" in service(bounded)
    assert "TimeoutStartSec" not in service(NIGHT)
    file = nightly_files.written(tmp_path)
    done = commands.conserve("eval", "schedule", str(file), "--within", "1.5h")
    assert "timeout --kill-after=120 5400 " in done.stdout
    for length in ("6", "0s", "soon"):
        refused = commands.conserve("eval", "schedule", str(file), "--within", length)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert f"--within '{length}' is no length of time; write 6h or 90m" in refused.stderr


def test_a_run_that_is_stopped_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluating, "run_suites", Mock(side_effect=KeyboardInterrupt))
    file = nightly_files.written(tmp_path)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        evaluating.evaluate(load(), Asking(file=file, overrides={}), said.append)
    assert said[-1].endswith(f" stopped; go on with: conserve eval run {file}")


def test_init_writes_a_file_once(tmp_path: Path) -> None:
    nightly_files.written(tmp_path)
    file = tmp_path / "first.toml"
    words = ("eval", "init", str(file), "--data", "questions.jsonl", "--limit", "3")
    assert commands.conserve(*words).returncode == 0
    again = commands.conserve(*words)
    assert again.returncode == 2
    assert "is there already" in again.stderr
    assert commands.conserve("eval", "run", str(file), "--check").returncode == 0
    assert commands.conserve("eval", "init", str(tmp_path / "x.toml")).returncode == 2


def test_init_asks_for_the_model_of_an_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nightly_files.written(tmp_path)
    asked = {"Its model, as it lists it (empty if it has one alone)": "chat"}
    monkeypatch.setattr(evaluation_setup.sys, "stdin", Mock(isatty=lambda: True))
    monkeypatch.setattr(
        evaluation_setup.typer, "prompt", lambda words, *, default, **_: asked.pop(words, default)
    )
    file = tmp_path / "n.toml"
    evaluation_setup.init(file, data="questions.jsonl", endpoint="http://gpu1:8000")
    (target,) = plan_of(file.read_text()).targets
    assert (target.endpoint, target.model, asked) == ("http://gpu1:8000", "chat", {})


@pytest.mark.parametrize(
    ("expected", "named"),
    [
        ("text", "i.input_text::"),
        ("job_id", "i.input_job_id::"),
        ("order", "i.order::"),
        ('a"b\\c"', 'i."a""b\\c"""::'),
    ],
)
def test_init_names_the_right_answer_as_sql_does(tmp_path: Path, expected: str, named: str) -> None:
    data = tmp_path / "ev.parquet"
    pq.write_table(pa.table({"q": ["one?"], expected: ["1"]}), data)
    words = ("--data", "ev.parquet", "--prompt", "{{ q }}", "--expected", expected)
    done = commands.conserve("eval", "init", str(tmp_path / "n.toml"), *words)
    assert done.returncode == 0, done.stderr
    plan = plan_of((tmp_path / "n.toml").read_text())
    assert named in str(plan.suites[0].options["score"])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"--data": "none.jsonl"}, "none.jsonl"),
        ({"--prompt": "{{ quest }}"}, "quest"),
        ({"--expected": "right"}, "names the column 'right'"),
    ],
)
def test_init_writes_no_file_whose_questions_cannot_be_asked(
    wrong: dict[str, str], says: str, tmp_path: Path
) -> None:
    nightly_files.written(tmp_path)
    file = tmp_path / "first.toml"
    flags = {"--data": "questions.jsonl", "--prompt": "{{ question }}", "--expected": "answer"}
    words = [word for flag in (flags | wrong).items() for word in flag]
    done = commands.conserve("eval", "init", str(file), *words)
    assert done.returncode == 2
    assert says in done.stderr
    assert not file.exists()


class Hook(HTTPServer):
    """A webhook that answers with these codes in turn."""

    def __init__(self, *codes: int) -> None:
        super().__init__(("127.0.0.1", 0), Posted)
        self.codes = list(codes)
        self.posted: list[tuple[bytes, dict[str, str]]] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook"


class Posted(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server.posted.append((body, dict(self.headers)))
        self.send_response(server.codes.pop(0))
        self.end_headers()

    def log_message(self, format: str, *values: object) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[Any]:
    made: list[Hook] = []

    def make(*codes: int) -> Hook:
        made.append(Hook(*codes))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()
        one.server_close()


DOCUMENT = {"headline": "No worse.", "run": {"id": "x"}, "comparison": None, "flips": [{"prompt": "secret"}]}


def test_the_verdict_is_posted_with_its_signature(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_KEY", "key")
    server = hook(503, 204)
    said = post(DOCUMENT, server.address, Reports(secret_variable="HOOK_KEY"), sleep=lambda s: None)
    assert said.startswith("posted")
    body, headers = server.posted[-1]
    assert json.loads(body) == {"headline": "No worse.", "run": {"id": "x"}, "comparison": None}
    assert headers[SIGNATURE] == f"sha256={hmac.new(b'key', body, hashlib.sha256).hexdigest()}"
    assert len(server.posted) == 2


def test_reports_that_cannot_be_written_cost_no_verdict(hook: Any, tmp_path: Path) -> None:
    server = hook(204)
    (tmp_path / "pages").write_text("a file")
    reports = f'[reports]\nfolder = "pages/of"\nforms = ["html", "json"]\nwebhook = "{server.address}"\n'
    file = nightly_files.written(tmp_path, rows=6, top="worse.effect = 0.1")
    file.write_text(f"{file.read_text()}\n{reports}")
    given = {"CONSERVE_FAKE": "1", "CONSERVE_ENDPOINT": "fake:?tokens=8"}
    done = commands.conserve("eval", "run", str(file), **given)
    assert done.returncode == 1
    assert done.stdout.rstrip().endswith("The first night: there is nothing to compare with yet.")
    assert done.stderr.count("cannot be written") == 2
    assert len(server.posted) == 1


def test_a_webhook_that_refuses_is_asked_once(hook: Any) -> None:
    server = hook(403)
    said = post(DOCUMENT, server.address, Reports(), sleep=lambda s: None)
    assert "was not posted" in said
    assert "/hook" not in said, "the path of a webhook is its key"
    assert "403" in said
    assert SIGNATURE not in server.posted[0][1]


def test_servers_that_answer_tell_of_their_live_latencies(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"a": report(), "b": Unreported("does not answer"), "c": STOCK}
    monkeypatch.setattr(served_jobs, "running", lambda settings: [SimpleNamespace(url=url) for url in said])
    monkeypatch.setattr(served_jobs, "ask", lambda url, settings, seconds: said[url])
    assert served_jobs.answers(load()) == [said["a"]]


def test_of_what_servers_say_the_worst_minute_is_kept() -> None:
    said = report(online={"ttft_ms": {"p99": 80.0}})
    harm = {"with_ms": 55.0, "without_ms": 50.0, "ratio": 1.1, "low": None, "high": None}
    later = report(online={"ttft_ms": {"p99": 50.0}, "tbt_ms": {"p99": 9.0}}, harm={"ttft_ms": {"p99": harm}})
    assert worst(worst(None, said), later) == LiveLatencies(
        ttft_p99_ms=80.0, tbt_p99_ms=9.0, ttft_p99_ratio=1.1
    )
    assert worst(worst(None, later), said) == worst(worst(None, said), later), (
        "whichever server says it first"
    )


def test_records_and_messages_hold_no_secret() -> None:
    words = ("--api-key k1 k2 --dtype float32", "--api_key=k3", "--seed 3")
    assert flags_of(words) == "--api-key=*** --dtype float32 --api_key=*** --seed 3"
    assert flags_of(("--dtype  float32",)) == "--dtype float32"
    assert address_of("http://me:pass@host:8/v1") == "http://***@host:8/v1"
    assert address_of("http://me:pass@host/v1@2") == "http://***@host/v1@2"
    assert address_of("http://host/v1@2") == "http://host/v1@2"
    assert address_of("fake:?tokens=8") == "fake:?tokens=8"
    assert host_of("https://me:pass@hooks.example/T0/B0?key=k") == "https://hooks.example"


SECRETS = """
name = "small"  # the key is in api_key
[model]
endpoint = "https://me:pass1@host/v1?api_key=pass2&x=1"
engine_args = ["--api-key", "pass3", "--hf-token=pass4", "--seed", "3"]
[reports]
webhook = "https://hooks.example/T0/pass5"
secret_variable = "NAME"
[suites.one]
kind = "sql"
source = "postgresql://me:pass6/7@db/x"
api_key = '''pass7'''
headers = { "Authorization" = "Bearer pass8", password = 'pass9', max_tokens = 9, x-token = "pass\\"10" }
prompt = "password = '"
other = "it's"
"""


def test_a_plan_without_its_secrets_is_still_a_plan() -> None:
    shown = plan_text_of(SECRETS)
    assert "pass1" in SECRETS
    assert not re.findall(r"pass\d|pass\W+10", shown)
    assert plan_text_of(shown) == shown
    found = tomllib.loads(shown)
    assert found["model"] == {
        "endpoint": "https://***@host/v1?api_key=***&x=1",
        "engine_args": ["--api-key", "***", "--hf-token=***", "--seed", "3"],
    }
    assert found["reports"] == {"webhook": "https://hooks.example", "secret_variable": "NAME"}
    one = found["suites"]["one"]
    assert (one["source"], one["api_key"], one["other"]) == ("postgresql://***@db/x", "***", "it's")
    assert one["headers"] == {"Authorization": "***", "password": "***", "max_tokens": 9, "x-token": "***"}


def test_a_run_of_another_user_is_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.kill", Mock(side_effect=PermissionError))
    with held(tmp_path, "small", "queue", print), pytest.raises(JobRefused, match="of another user"):
        end(owners.this_process(), "small")


def test_records_of_runs_are_read_the_oldest_first_and_damaged_ones_left_out(tmp_path: Path) -> None:
    records = {
        "late": '{"id": "late", "began_at": 9}',
        "b": '{"id": "b", "began_at": 7.5, "score": 1}',
        "a": '{"id": "a", "began_at": 7.5}',
        "half": '{"id": "half"',
        "timeless": '{"id": "timeless"}',
        "nameless": '{"began_at": 1}',
        "list": "[]",
        "when": '{"id": "when", "began_at": "soon"}',
        "null": '{"id": "null", "began_at": null}',
    }
    assert list(nights.records(tmp_path)) == []
    for name, content in records.items():
        nights.folder_of(tmp_path, name).mkdir(parents=True)
        (nights.folder_of(tmp_path, name) / nights.RECORD).write_text(content)
    (nights.folder_of(tmp_path, "folder") / nights.RECORD).mkdir(parents=True)
    nights.folder_of(tmp_path, "copy").mkdir()
    (nights.folder_of(tmp_path, "copy") / nights.RECORD).write_text(f'{records["a"][:-1]}, "copied": true}}')
    assert [record["id"] for record in nights.records(tmp_path)] == ["a", "a", "b", "late"]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b'{"run-1": ["baseline", 2], "run-2": []}', {"run-1": ["baseline", "2"], "run-2": []}),
        (b'{"baseline": "run-1", "other": 2, "run-1": ["third"]}', {"run-1": ["third"]}),
        *[(content, {}) for content in (b"", b"{", b"[]", b"\xff")],
    ],
)
def test_names_of_runs_are_none_if_their_file_is_damaged(
    tmp_path: Path, content: bytes, found: dict[str, list[str]]
) -> None:
    assert nights.names(tmp_path) == {}
    nights.names_file(tmp_path).parent.mkdir()
    nights.names_file(tmp_path).write_bytes(content)
    assert nights.names(tmp_path) == found


def test_files_of_evaluations_lie_in_one_folder_of_the_home(tmp_path: Path) -> None:
    folder = tmp_path / "evals"
    assert nights.folder_of(tmp_path, "run-1") == folder / "runs" / "run-1"
    assert nights.lock_file(tmp_path, "small") == folder / "small.lock"
    assert nights.names_file(tmp_path) == folder / "names.json"
