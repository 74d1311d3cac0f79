"""Words of `conserve serve` and `conserve status` on rows that leave, and the flags of the server."""

import asyncio
import json
import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError

import httpx
import pytest
from msgspec import structs
from typer.testing import CliRunner

from conserve.api.overview import server_seen
from conserve.api.servers import unanswered
from conserve.cli import serve as serving
from conserve.cli import (
    serve_files,
    serve_flags,
    serve_notices,
    serve_printed,
    serve_spill,
    server_status,
    top_frame,
)
from conserve.cli.app import app
from conserve.cli.found_promises import arrivals_file
from conserve.cli.profile import require_writable
from conserve.cli.server_status import AskedServer
from conserve.config import Settings, load
from conserve.engine.policy.policies import SERVING
from conserve.engine.section import EngineSection
from conserve.engine.service import ProcessCommand
from conserve.engine.vllm.launching.flags import names_scheduling
from conserve.engine.vllm.server.printed import KEYS
from conserve.errors import SettingsError
from conserve.store.books import keys
from conserve.store.database.store import Store
from tests.server_reports import DISK, MODEL, answer, of_class, report

WHY = "the pipeline is parallel"


@pytest.mark.parametrize(
    "flag",
    ["--worker-cls", "--worker_cls=mine.Worker", "--scheduler-cls=x", "--additional_config.conserve.policy"],
)
def test_what_conserve_serve_decides_is_refused(flag: str) -> None:
    with pytest.raises(SettingsError, match="leave it out, or start vllm serve yourself"):
        serve_flags.refuse_ours(["--tensor-parallel-size", "2", flag])
    serve_flags.refuse_ours(["--tensor-parallel-size", "2", "--async-scheduling"])


@pytest.mark.parametrize("flag", ["--slo-ttft", "--ttft", "--ttft-ms"])
def test_a_promise_by_another_name_is_refused_with_its_own_before_anything_starts(flag: str) -> None:
    with pytest.raises(SettingsError, match=f"no flag {flag}; --ttft-slo promises a TTFT"):
        serve_flags.refuse_ours(["--tensor-parallel-size", "2", flag, "300ms"])


def test_a_promise_in_a_file_of_vllms_flags_is_told_where_it_belongs(tmp_path: Path) -> None:
    (tmp_path / "vllm.yaml").write_text("ttft-slo: 300ms\n")
    with pytest.raises(
        SettingsError, match=r"--ttft-slo \(in .*vllm.yaml\) is no flag of vLLM's; give it to"
    ):
        serve_flags.refuse_ours(["--config", str(tmp_path / "vllm.yaml")])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--distributed-executor-backend", "ray"], "--distributed-executor-backend ray"),
        (["--distributed_executor_backend=ray"], "--distributed-executor-backend ray"),
        (["--data-parallel-backend", "ray"], "--data-parallel-backend ray"),
        (["-dpb", "ray"], "--data-parallel-backend ray"),
        (["-n2"], "--nnodes 2"),
        (["--dtype", "float32", "--nnodes", "2"], "--nnodes 2"),
    ],
)
def test_a_model_that_spans_machines_is_refused_in_one_sentence(flags: list[str], named: str) -> None:
    with pytest.raises(SettingsError, match=f"cannot run with {named}: .* conserve harvest --endpoint URL"):
        serve_flags.refuse_machines(flags)


def test_a_model_on_one_machine_is_not_refused() -> None:
    serve_flags.refuse_machines(
        ["--distributed-executor-backend", "mp", "--nnodes=1", "--tensor-parallel-size", "2"]
    )


def test_the_sentence_stands_on_the_page_of_modes() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs/reference/modes.md").read_text().split())
    with pytest.raises(SettingsError) as refused:
        serve_flags.refuse_machines(["--distributed-executor-backend", "ray"])
    assert str(refused.value) in page


@pytest.mark.parametrize(
    ("flags", "limit_s"),
    [
        ([], 45),
        (["--max-model-len", "2048"], 45),
        (["--shutdown-timeout", "7"], 22),
        (["--shutdown-timeout=7"], 22),
        (["--shutdown_timeout=6", "--seed", "1", "--shutdown_timeout", "7"], 22),
        (["--dtype", "float32", "--shutdown-timeout"], 45),
    ],
)
def test_the_server_may_take_as_long_to_end_as_vllm_is_told(flags: list[str], limit_s: float) -> None:
    assert serve_flags.drain_s(flags) == limit_s


@pytest.mark.parametrize(
    ("words", "environ", "utility"),
    [
        ((), {}, 0.9),
        (("--utility", "0.25"), {"CONSERVE_UTILITY": "1"}, 0.25),
        ((), {"CONSERVE_UTILITY": "1"}, 1.0),
    ],
)
def test_the_harvester_gets_the_utility(
    words: tuple[str, ...], environ: dict[str, str], utility: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Sequence[str]] = []
    command = serving.harvester_command

    def catch(*arguments: Any) -> Any:
        found.append(command(*arguments).words)
        raise SettingsError("caught")

    monkeypatch.setattr(serving, "harvester_command", catch)
    monkeypatch.setattr(serving, "require_free", lambda host, port: None)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    CliRunner().invoke(app, ["serve", "smollm2-demo", *words])
    assert float(found[0][found[0].index("--utility") + 1]) == utility


def section_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    """Configuration that the server would be started with."""
    found: list[dict[str, Any]] = []

    def catch(settings: Any, section: EngineSection, *rest: Any) -> Any:
        found.append(section.document())
        raise SettingsError("caught")

    monkeypatch.setattr(serving, "server_command", catch)
    monkeypatch.setattr(serving, "require_free", lambda host, port: None)
    CliRunner().invoke(app, ["serve", "smollm2-demo", *words])
    return found[0]


def test_printing_flags_says_first_what_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def run(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        said.append(capsys.readouterr().err)
        return subprocess.CompletedProcess((), 3)

    monkeypatch.setattr("conserve.engine.vllm.compat.installed.require_engine", lambda: None)
    monkeypatch.setattr(subprocess, "run", run)
    assert serve_printed.print_command(replace(load(), model="m"), EngineSection(), []) == 3
    assert said == ["importing vLLM, which completes the flags for m\n"]


def test_preemption_is_the_engines_default_unless_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "preemption" not in section_of(monkeypatch)
    assert section_of(monkeypatch, "--no-preemption")["preemption"] == "off"
    assert section_of(monkeypatch, "--no-preemption", "--allow-control")["preemption"] == "off"


@pytest.mark.parametrize("policy", SERVING[1:])
def test_vllms_worker_stays_where_no_row_leaves_an_iteration(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    assert section_of(monkeypatch, "--policy", policy)["preemption"] == "off"
    assert "preemption" not in section_of(monkeypatch, "--policy", policy, "--allow-control")


def test_views_are_recorded_in_a_file_that_the_server_finds_from_wherever_it_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "record_views" not in section_of(monkeypatch)
    assert section_of(monkeypatch, "--record-views", "views.jsonl")["record_views"] == str(
        tmp_path / "views.jsonl"
    )


@pytest.mark.parametrize("file", ["nowhere/views.jsonl", "."])
def test_a_file_that_cannot_be_recorded_in_is_refused_before_the_server_starts(file: str) -> None:
    with pytest.raises(SettingsError, match=r"--record-views .* is no file in a folder that exists"):
        serve_flags.recording_at(Path(file))


def test_preemption_that_cannot_be_is_said_in_a_sentence_unless_it_was_not_wanted() -> None:
    def said(why: str | None, section: EngineSection) -> list[str]:
        return serve_notices.not_left(report(preemption={"why_off": why}).preemption, section)

    (sentence,) = said(WHY, EngineSection())
    assert sentence == f"live requests wait for the iteration under way, which rows cannot leave: {WHY}"
    assert said(None, EngineSection()) == []
    assert said("it is switched off", EngineSection(preemption="off")) == []


def test_the_user_may_say_whether_iterations_are_scheduled_ahead() -> None:
    assert not names_scheduling(["--tensor-parallel-size", "2"])
    for said in ("--async-scheduling", "--no-async-scheduling", "--async_scheduling"):
        assert names_scheduling(["--seed", "1", said])


def shown(**changes: Any) -> list[str]:
    """Lines of `status` on a server that has been asked for nothing, with these changes."""
    return server_status.lines([AskedServer("http://127.0.0.1:8000", report(**changes))])


def test_status_and_top_say_how_old_figures_are_where_the_scheduler_has_not_answered() -> None:
    since = "(its scheduler has not answered since)"
    for age_s, words in (
        (None, ""),
        (0.4, ""),
        (72.0, f" until 1 min 12 s ago {since}"),
    ):
        assert shown(age_s=age_s)[0] == f"http://127.0.0.1:8000  policy conserve, last minute{words}:"
        below = top_frame.server_lines(server_seen("http://a", report(age_s=age_s)), 100)[2:]
        assert [str(text).rstrip() for text in below] == (
            [f"   seen{words.removeprefix(' until')}"] if words else []
        )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (URLError(ConnectionRefusedError()), "does not answer (starting, or ended)"),
        (TimeoutError(), "does not answer (busy)"),
        (ValueError(), "does not answer"),
    ],
)
def test_status_tells_a_busy_server_from_one_that_starts(error: Exception, words: str) -> None:
    assert unanswered(error) == words


def test_status_says_what_preemption_did() -> None:
    def line(preemption: dict[str, Any], tokens: int = 85_000) -> str:
        return shown(preemption=preemption, offline={"tokens": tokens})[4]

    assert line({"iterations_left": 12, "tokens_redone": 340, "reaction_ms": {"p50": 3.0, "p99": 14.2}}) == (
        "  since the start rows left 12 iterations, 340 tokens redone (0.4% of offline tokens), reaction P99 14 ms"
    )
    assert line({}, 0) == "  since the start rows left 0 iterations"
    assert line({"policy": "off", "why_off": WHY}) == f"  rows leave no iteration: {WHY}"
    assert line({"policy": "off"}) == "  rows leave no iteration"


def test_status_says_what_became_of_kv() -> None:
    counted: dict[str, Any] = {
        "policy": "adaptive", "tokens_saved": 4096, "tokens_restored": 2048, "tokens_recomputed": 77,
        "blocks_failed": 1, "spill": DISK,
    }  # fmt: skip
    line = "  tokens of KV 4,096 saved, 2,048 restored, 77 recomputed, 1 block not copied"

    def below(**disk: Any) -> list[str]:
        return server_status.checkpointed(
            report(checkpoint={**counted, "spill": {**DISK, **disk}}).checkpoint
        )

    assert below() == [line]
    assert below(tokens_taken_in=640) == [line, "  640 tokens of KV from disk"]
    assert below(tokens_taken_in=640, refused=WHY) == below(tokens_taken_in=640), "nothing was written since"
    assert below(refused=WHY) == [line, f"  nothing from disk: {WHY}"]
    off = report(checkpoint={**counted, "policy": "off", "why_off": WHY})
    assert server_status.checkpointed(off.checkpoint) == [f"  no KV checkpoints: {WHY}"]
    assert server_status.checkpointed(report().checkpoint) == []


def test_status_says_which_model_plans_and_how_far_off_it_was() -> None:
    off = {"iterations": 1000, "p50": 0.061, "p99": 0.314}
    assert shown(latency_model={**MODEL, "off": off})[3] == (
        "  model    conserve from the warm-up, off by 6%, P99 31%, of the last 1,000 iterations"
    )
    assert shown(latency_model=MODEL)[3] == (
        "  model    conserve from the warm-up, no iteration compared yet"
    )
    assert shown()[3] == "  no latency model: no SLO is kept until there is one"
    assert shown(policy="online-only")[3] == "  no latency model"


# Files.


def test_a_home_is_private_also_where_no_store_is_the_first_in_it(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "served")
    arrivals_file(settings, "m", 8000)
    require_writable(tmp_path / "profiled", tmp_path / "profiled" / "profiles")
    for name in ("served", "profiled"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700


def test_replicas_that_share_a_home_have_logs_and_arrivals_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, found = Settings(home=tmp_path), set()
    for host in ("pod-1", "pod-2"):
        monkeypatch.setattr(serve_files.socket, "gethostname", lambda host=host: host)
        found |= {
            serving.server_command(settings, EngineSection(), [], 8000).log,
            arrivals_file(settings, "m", 8000),
        }
    logs = {tmp_path / "serving" / f"{host}-8000.log" for host in ("pod-1", "pod-2")}
    assert found == logs | {tmp_path / "serving/arrivals/m" / f"{log.stem}.csv" for log in logs}


def test_files_of_servers_that_have_gone_long_ago_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "serving/arrivals/m"
    folder.mkdir(parents=True)
    now = 1e9
    for name in ("pod.log", "arrivals/m/pod.csv", "arrivals/m/pod.csv.1", "other.json"):
        for age_s, prefix in ((serve_files.KEPT_S + 1, "gone-"), (serve_files.KEPT_S - 1, "here-")):
            path = tmp_path / "serving" / name
            path = path.with_name(prefix + path.name)
            path.write_text("")
            os.utime(path, (now - age_s, now - age_s))
    serve_files.drop_old(tmp_path, now=now)
    left = {path.name for path in (tmp_path / "serving").rglob("*") if path.is_file()}
    assert {name for name in left if name.startswith("gone-")} == {"gone-other.json"}
    assert len(left) == 5
    serve_files.drop_old(tmp_path / "none", now=now)


# Keys.


def test_a_harvester_reaches_its_server_without_a_proxy(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "hub.example")
    told = serving.harvester_command(settings, "http://10.0.0.5:8000").environment
    assert {told["NO_PROXY"], told["no_proxy"]} == {"hub.example,10.0.0.5"}


def environments(settings: Settings) -> tuple[dict[str, str], dict[str, str]]:
    """Environments of the server and of the harvester."""
    server = serving.server_command(settings, EngineSection(), ["--port", "1"], 1)
    harvester = serving.harvester_command(settings, "http://127.0.0.1:1")
    for command in (server, harvester):
        assert not any(
            key and key in word for word in command.words for key in (settings.api_key, settings.harvest_key)
        )
    return dict(server.environment), dict(harvester.environment)


def test_the_harvester_gets_a_key_of_its_own_that_no_command_line_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CONSERVE_API_KEY", "sesame")
    first, second = (serving.keyed(load()) for _ in range(2))
    assert first.harvest_key is not None
    assert second.harvest_key is not None
    assert first.harvest_key != second.harvest_key
    assert len(first.harvest_key) >= 40
    server, harvester = environments(first)
    assert (server["VLLM_API_KEY"], server["CONSERVE_HARVEST_KEY"]) == ("sesame", first.harvest_key)
    assert harvester["CONSERVE_HARVEST_KEY"] == first.harvest_key


def test_a_harvesters_key_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSERVE_API_KEY", "sesame")
    monkeypatch.setenv("CONSERVE_HARVEST_KEY", "open")
    assert serving.keyed(load()).harvest_key == "open"


def test_without_an_api_key_there_is_no_key_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("CONSERVE_HARVEST_KEY", "open")
    keyed = serving.keyed(load())
    assert (keyed.api_key, keyed.harvest_key) == (None, None)
    server, harvester = environments(keyed)
    assert (server["VLLM_API_KEY"], server["CONSERVE_HARVEST_KEY"], harvester["CONSERVE_HARVEST_KEY"]) == (
        "",
        "",
        "",
    )
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    assert serving.keyed(load()).api_key == "sesame"


def test_a_key_among_vllms_flags_is_refused() -> None:
    for flag in ("--api-key", "--api_key=sesame"):
        with pytest.raises(SettingsError, match="set CONSERVE_API_KEY instead"):
            serve_flags.refuse_ours([flag, "sesame"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--no-harvest", "--share", "jobs"], "--share is for the harvester; leave it out with"),
        (
            ["--no-harvest", "--share", "jobs", "--utility", "1"],
            "--utility and --share are for the harvester",
        ),
        (["--no-batches", "--max-file", "200MB"], "--max-file is for files and batches; leave it out with"),
        (["--no-batches", "--max-requests", "5"], "--max-requests is for files and batches; leave it out"),
    ],
)
def test_flags_of_a_process_that_is_not_started_are_refused(words: list[str], sentence: str) -> None:
    refused = CliRunner().invoke(app, ["serve", "m", *words])
    assert isinstance(refused.exception, SettingsError)
    assert str(refused.exception).startswith(sentence)


def test_settings_of_a_process_that_is_not_started_are_of_other_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CONSERVE_METRICS_PORT", "9108")
    assert section_of(monkeypatch, "--no-harvest", "--no-batches")


def test_a_page_of_the_harvester_without_one_is_told_and_the_server_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Compose file has the port always."""
    said: list[str] = []
    monkeypatch.setattr("conserve.cli.serve_unused.output.say", said.append)
    assert section_of(monkeypatch, "--no-harvest", "--metrics-port", "9108")
    assert any("nothing is served or sent by --metrics-port" in one for one in said)


def test_a_printed_command_is_refused_by_the_shell_while_a_key_is_unset() -> None:
    both = {"VLLM_API_KEY": "a key", "CONSERVE_HARVEST_KEY": "another"}
    server = shlex.join(["sh", "-c", 'printf "<%s>" "$VLLM_API_KEY" "$CONSERVE_HARVEST_KEY" "$@"', "server"])
    line = f"{' '.join(KEYS)} {server}"

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh"], input=line, env={"PATH": os.environ["PATH"], **variables}, capture_output=True, text=True
        )

    assert run(**both).stdout == "<a key><another>", "and none of them in the command line"
    for missing in both:
        refused = run(**{**both, missing: ""})
        assert (refused.returncode != 0, refused.stdout) == (True, "")
        assert f"{missing}: set the key of" in refused.stderr


@pytest.mark.parametrize("keyed_by", ["setting", "store", None])
def test_a_printed_command_asks_for_keys_where_conserve_serve_would(
    keyed_by: str | None, monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if keyed_by == "setting":
        monkeypatch.setenv("CONSERVE_API_KEY", "sesame")
    if keyed_by == "store":
        with store.write() as tx:
            keys.add(tx, "web", project="pages", now=0.0)
    found: list[Any] = []

    def catch(settings: Settings, section: object, flags: object, notices: Sequence[str]) -> int:
        found.extend((settings.api_key, *notices))
        return 0

    monkeypatch.setattr(serving, "print_command", catch)
    words = ["serve", "m", "--host", "0.0.0.0", "--no-batches", "--print-flags"]
    words += ["--max-body", "1MB", "--open-metrics"]
    assert CliRunner().invoke(app, ["--home", str(store.home), *words]).exit_code == 0
    key, notice, lacks = found
    assert lacks == "the printed command has no --open-metrics and --max-body: only conserve serve has"
    assert (key is not None) == (keyed_by is not None)
    assert ("export VLLM_API_KEY" if keyed_by else "no API key: any machine") in notice


@pytest.mark.parametrize(
    ("host", "key", "open_"),
    [
        ("127.0.0.1", None, False), ("localhost", None, False), ("::1", None, False), ("127.0.0.9", None, False),
        ("0.0.0.0", None, True), ("::", None, True), ("10.0.0.1", None, True), ("gpu-7", None, True),
        ("0.0.0.0", "sesame", False),
    ],
)  # fmt: skip
def test_a_server_that_all_may_use_is_said_to_be_one(host: str, key: str | None, open_: bool) -> None:
    settings = replace(load(), api_key=key)
    said = serve_notices.open_to_all(host, settings)
    assert len(said) == open_
    assert all(host in sentence and "CONSERVE_API_KEY" in sentence for sentence in said)


def test_a_policy_that_knows_no_slo_says_so() -> None:
    section = EngineSection(policy="priority", ttft_slo_ms=1500.0)
    assert serve_notices.only_counted(section) == [
        "--policy priority knows no SLO: --ttft-slo is counted, and not kept"
    ]
    assert serve_notices.only_counted(structs.replace(section, policy="online-only")) == []
    for none in (EngineSection(policy="priority"), EngineSection(policy="priority", harm=None)):
        assert serve_notices.only_counted(none) == []
    assert serve_notices.only_counted(structs.replace(section, harm=0.05)) == [
        "--policy priority knows no SLO: --ttft-slo and --harm are counted, and not kept"
    ]


@pytest.mark.parametrize(
    ("policy", "words", "above"),
    [
        ("conserve", "rows add at most about 10%", "harm ≤10%"),
        ("online-only", "rows add at most about 10%", "harm ≤10%"),
        ("priority", "no promise", "no promise"),
        ("non-preemptive", "no promise", "no promise"),
    ],
)
def test_no_harm_is_told_of_under_a_policy_that_keeps_none(policy: str, words: str, above: str) -> None:
    told = {"policy": policy, "slo": {"harm": 0.1}}
    assert shown(**told)[1].endswith(f", {words}")
    chat = of_class(slo={"harm": 0.1}, requests=1)
    assert f", {words}, " in shown(**told, classes={"chat": chat})[2]
    assert above in top_frame.server_lines(server_seen("http://a", report(**told)), 100)[0].plain


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bytes], None]:
    """Sets what the server that `serve` has started answers."""
    client = httpx.AsyncClient

    def answering(status: int, content: bytes) -> None:
        transport = httpx.MockTransport(lambda request: httpx.Response(status, content=content))
        monkeypatch.setattr(httpx, "AsyncClient", partial(client, transport=transport))

    return answering


@pytest.mark.parametrize(
    ("status", "content", "words"),
    [
        (200, {**DISK, "blocks_spilled": 3, "bytes_spilled": 5_000_000}, "is kept: 3 blocks, 5 MB\n"),
        (200, {**DISK, "why_off": WHY}, f"is not kept: {WHY}\n"),
        (
            200,
            {**DISK, "blocks_spilled": 3, "refused": "the disk is full"},
            "is not kept: the disk is full\n",
        ),
        (200, DISK, ""),
        (404, {"error": {"message": "no checkpoints"}}, "is not kept: no checkpoints\n"),
        (200, {}, "is not kept: the server does not say what came of it (ValidationError)\n"),
        (502, {}, "is not kept: the server does not say what came of it (KeyError)\n"),
    ],
)
def test_what_came_of_the_kv_of_rows_in_flight_is_said(
    status: int,
    content: dict[str, Any],
    words: str,
    answering: Callable[[int, bytes], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    answering(status, json.dumps(content).encode())
    server = serve_spill.supervised(ProcessCommand(name="server", words=("server",)))
    asyncio.run(serve_spill.spill(load(), server, "http://server"))
    said = capsys.readouterr().err
    assert said.removeprefix("KV of rows in flight ") == words


def test_a_server_that_tells_no_report_at_its_start_is_said_to(
    answering: Callable[[int, bytes], None],
) -> None:
    section = EngineSection(harm=0.1)

    def said() -> list[str]:
        return asyncio.run(serve_notices.warnings(load(), section, "http://server"))

    answering(200, answer(preemption={"why_off": WHY}))
    assert any(sentence.endswith(WHY) for sentence in said())
    for status, content in ((200, b"{}"), (200, b"x"), (404, b"{}")):
        answering(status, content)
        assert said() == ["the server does not say how it does; is another plug-in in its way?"]


def test_limits_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Sequence[str]] = []
    command = serving.server_command

    def catch(*arguments: Any) -> Any:
        found.append(command(*arguments).words)
        raise SettingsError("caught")

    monkeypatch.setattr(serving, "server_command", catch)
    monkeypatch.setattr(serving, "require_free", lambda host, port: None)
    words = ["serve", "smollm2-demo", "--max-body", "1MB", "--max-connections", "7", "--open-metrics"]
    words += ["--max-file", "5MB"]
    CliRunner().invoke(app, words)
    CliRunner().invoke(app, ["serve", "smollm2-demo"])
    limits = [json.loads(next(word for word in words if "body_bytes" in word))["limits"] for words in found]
    assert limits == [
        {"body_bytes": 1_000_000, "file_bytes": 5_000_000, "connections": 7, "open_metrics": True},
        {"body_bytes": 64 << 20, "file_bytes": 200_000_000, "connections": 4096, "open_metrics": False},
    ]
    assert CliRunner().invoke(app, ["serve", "smollm2-demo", "--max-body", "much"]).exit_code != 0
