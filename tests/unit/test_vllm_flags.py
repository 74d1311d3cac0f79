"""Flags of vLLM on a command line: every spelling is read alike, wherever one is looked for."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conserve.api.running import ProfileFlags, make_endpoint
from conserve.bench.presets import CPU
from conserve.cli import serve as serving
from conserve.cli.app import app
from conserve.cli.bench_plan import own_plan
from conserve.cli.doctor_engine import number_format
from conserve.cli.serve_flags import drain_s, host_bytes, refuse_ours
from conserve.config import Settings
from conserve.engine.runtime.vllm_flags import (
    GivenFlag,
    given_flags,
    names_of,
    spelled_out,
    value_of,
    words_of_file,
)
from conserve.engine.vllm.checkpoint.kv_transfer import copies_bytes, with_checkpoints, without
from conserve.engine.vllm.launching.flags import cpu_defaults, engines_of, names_scheduling
from conserve.engine.vllm.launching.number_format import names_format
from conserve.engine.vllm.model.tokenizer import asked_length
from conserve.engine.vllm.server.process import profile_command
from conserve.engine.vllm.server.process import without as without_given
from conserve.errors import SettingsError
from conserve.nightly.redacted import flags_of
from tests.commands import conserve

SPELLINGS: Sequence[Sequence[str]] = [
    ("--data-parallel-size", "2"),
    ("--data_parallel_size", "2"),
    ("--data-parallel-size=2",),
    ("--data_parallel_size=2",),
    ("-dp", "2"),
    ("-dp=2",),
]


@pytest.mark.parametrize("given", SPELLINGS)
@pytest.mark.parametrize("before", [(), ("-dp", "4"), ("--seed", "-1", "--enforce-eager")])
def test_every_spelling_of_a_flag_is_read_and_the_last_one_counts(
    given: Sequence[str], before: Sequence[str]
) -> None:
    words = [*before, *given, "--data-parallel-size-local", "8"]
    assert value_of(words, "--data-parallel-size") == "2"
    assert engines_of(words) == 2
    assert without_given(["--data-parallel-size", "9", "--seed", "3"], words) == (
        [] if "--seed" in before else ["--seed", "3"]
    )
    assert [word for flag in given_flags(words) for word in flag.words] == words


def test_words_are_parted_as_vllm_parts_them() -> None:
    words = [
        "model",
        "--lora-modules",
        "a=b",
        "c=d",
        "--seed=-1",
        "-n2",
        "-qfp8",
        "-O3",
        "--hf-x.a_b.c",
        "4",
    ]
    assert list(given_flags(words)) == [
        GivenFlag("", ["model"], ["model"]),
        GivenFlag("--lora-modules", ["a=b", "c=d"], words[1:4]),
        GivenFlag("--seed", ["-1"], ["--seed=-1"]),
        GivenFlag("--nnodes", ["2"], ["-n2"]),
        GivenFlag("--quantization", ["fp8"], ["-qfp8"]),
        GivenFlag("-O3", [], ["-O3"]),
        GivenFlag("--hf-x", ["4"], words[-2:], "a_b.c"),
    ]
    assert (list(given_flags([])), names_of(["model"]), value_of([], "--seed")) == ([], [], None)
    assert value_of(["--enforce_eager", "--seed", "1"], "--enforce-eager") == ""


def test_what_looks_like_a_flag_within_a_value_is_none() -> None:
    words = ["--served-model-name=--no-async-scheduling", "--seed", "-0.5"]
    assert not names_scheduling(words)
    assert value_of(words, "--seed") == "-0.5"


@pytest.mark.parametrize("spelling", ["--kv-transfer-config", "--kv_transfer_config"])
def test_a_connector_of_the_users_is_kept_however_it_is_spelled(spelling: str) -> None:
    theirs = {"kv_connector": "Theirs", "kv_role": "kv_both"}
    for words in ([spelling, json.dumps(theirs)], [f"{spelling}={json.dumps(theirs)}"]):
        assert without(["--seed", "1", *words]) == (["--seed", "1"], theirs)
        assert copies_bytes(with_checkpoints(words, {"host_bytes": 5})) == 5
    with pytest.raises(SettingsError, match="takes one JSON object here"):
        with_checkpoints([f"{spelling}.kv_connector", "Theirs"], {})


def test_what_conserve_serve_sets_is_refused_under_a_short_name_and_by_a_json_key() -> None:
    with pytest.raises(SettingsError, match="cannot run with --api-server-count"):
        refuse_ours(["-asc", "2"])
    with pytest.raises(SettingsError, match="--additional-config is set by conserve serve"):
        refuse_ours(["--additional_config.conserve.policy", "priority"])


@pytest.mark.parametrize("flag", ["--max-num-queued-reqs", "--max_num_queued_tokens=9", "--max-num-queued-t"])
def test_limits_under_which_rows_would_keep_live_requests_out_are_refused(flag: str, tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"conserve tune cannot run with --max-num-queued-.*counts rows too"
    ):
        refuse_ours([flag, "320"], "conserve tune")
    file = tmp_path / "vllm.yaml"
    file.write_text("max-num-queued-reqs: 320\n")
    with pytest.raises(
        SettingsError, match=r"--max-num-queued-reqs \(in .*vllm.yaml\): vLLM counts rows too"
    ):
        refuse_ours(["--config", str(file)])


@pytest.mark.parametrize(
    ("cut", "whole"),
    [
        (["--scheduling-pol", "priority"], "--scheduling-policy"),
        (["--scheduling_pol=priority"], "--scheduling-policy"),
        (["--additional-conf.conserve.policy", "priority"], "--additional-config"),
        (["--worker-c", "mine.Worker"], "--worker-cls"),
    ],
)
def test_a_name_that_is_cut_short_is_read_as_vllm_reads_it(cut: Sequence[str], whole: str) -> None:
    assert names_of(cut) == [whole]
    with pytest.raises(SettingsError, match=f"{whole} is set by conserve bench; leave it out"):
        refuse_ours([*cut], "conserve bench")
    assert names_of(["--data-parallel", "--dtype-of-mine", "-as", "2"]) == [
        *("--data-parallel", "--dtype-of-mine", "--api-server-count")
    ]


@pytest.mark.parametrize("command", [("bench",), ("bench", "--sweep", "quick"), ("tune",)])
def test_a_comparison_refuses_what_a_server_refuses(command: Sequence[str]) -> None:
    name, *more = command
    done = conserve(name, "smollm2-demo", *more, "--scheduler-cls", "mine.Scheduler")
    assert done.returncode == 2
    assert done.stderr == (
        f"conserve: --scheduler-cls is set by conserve {name}; leave it out, or start vllm serve yourself\n"
    )


def test_flags_in_a_configuration_file_are_refused_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    said = {
        "scheduling-policy: priority": "--scheduling-policy (in FILE) is set by conserve serve; leave it out",
        "additional_config: {conserve: {}}": "--additional-config (in FILE) is set by conserve serve",
        "grpc: true": "conserve serve cannot run with --grpc (in FILE)",
        "nnodes: 2": "conserve serve cannot run with --nnodes 2",
        "api-key: [a, b]": "ConServe does not see the key in FILE; set CONSERVE_API_KEY instead",
        "hf_token: t": "the token in FILE would stand on a command line, which all can read; set HF_TOKEN instead",
        "- 1": "--config FILE has no flags",
        "a: [": "--config FILE cannot be read: while parsing",
    }
    for text, message in said.items():
        file.write_text(text)
        with pytest.raises(SettingsError, match=re.escape(message.replace("FILE", str(file)))):
            refuse_ours(["--seed", "1", "--config", str(file)])
    file.write_text("grpc: false\nnnodes: 1\nlora-modules: [a=b, c=d]\nseed: 3\nenforce-eager: true\n")
    refuse_ours(["--config", str(file)])
    assert words_of_file(str(file))[2:] == ["--lora-modules", "a=b", "c=d", "--seed", "3", "--enforce-eager"]
    with pytest.raises(SettingsError, match=r"cannot be read: .*No such file"):
        refuse_ours([f"--config={tmp_path / 'none.yaml'}"])


@pytest.mark.parametrize("text", ["port: 9000", "host: 0.0.0.0"])
def test_an_address_in_a_configuration_file_is_no_address_of_the_server(text: str, tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(f"seed: 3\n{text}\n")
    done = conserve("serve", "smollm2-demo", "--config", str(file))
    assert done.returncode == 2
    assert done.stderr == (
        f"conserve: conserve serve does not listen where {file} says; take it out there and give "
        f"--{text.replace(':', '')} to conserve serve itself\n"
    )
    refuse_ours(["--config", str(file)], "conserve bench")  # which chooses ports itself


@pytest.mark.parametrize("given", [("--config", "FILE"), ("--config=FILE",)])
def test_the_words_of_a_file_stand_in_front_where_vllm_puts_them(
    given: Sequence[str], tmp_path: Path
) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "model: another\nconfig: a.yaml\nseed: 3\nenforce_eager: false\ngrpc: false\nheadless: false\n"
        "disable_log_stats: false\nlora-modules: []\nasync-scheduling: true\ncompilation-config: {mode: 3}\n"
    )
    named = [word.replace("FILE", str(file)) for word in given]
    words = spelled_out(["--dtype", "half", *named, "--seed", "4"])
    assert words == [
        *("--seed", "3", "--no-enforce_eager", "--async-scheduling", "--compilation-config", '{"mode": 3}'),
        *("--dtype", "half", "--seed", "4"),
    ]
    assert spelled_out(words) == words
    file.write_text("seed: 1\n")
    assert spelled_out([*named, *named, "behind"]) == ["--seed", "1", "--seed", "1", "behind"]


PRODUCTION = """
served-model-name: chat
kv-transfer-config: {kv_connector: Theirs, kv_role: kv_both}
data-parallel-size: 4
dtype: bfloat16
shutdown-timeout: 300
max-model-len: 8k
"""


@pytest.fixture
def production(tmp_path: Path) -> str:
    """A file of vLLM's flags."""
    file = tmp_path / "prod.yaml"
    file.write_text(PRODUCTION)
    return str(file)


def test_a_server_takes_what_stands_in_a_file(production: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[str]] = []

    def catch(settings: object, section: object, flags: list[str], *_: object) -> None:
        found.append(flags)
        raise SettingsError("caught")

    monkeypatch.setattr(serving, "server_command", catch)
    monkeypatch.setattr(serving, "require_free", lambda host, port: None)
    words = ["serve", "m", "--kv-host-memory", "1GiB", "--config", production]
    refused = CliRunner().invoke(app, [*words, "--kv-spill", "spilled"])
    assert "--kv-spill is for one engine, not for --data-parallel-size 4" in str(refused.exception)
    CliRunner().invoke(app, words)
    (flags,) = found
    assert "--config" not in flags
    assert without_given(["--served-model-name", "m", "--shutdown-timeout", "30"], flags) == []
    assert value_of(flags, "--served-model-name") == "chat"
    assert drain_s(flags) == 315
    assert names_format(flags)
    assert copies_bytes(flags) == 1 << 28, "a quarter for each engine"
    connectors = json.loads(value_of(flags, "--kv-transfer-config") or "")["kv_connector_extra_config"]
    assert [one["kv_connector"] for one in connectors["connectors"]] == ["CheckpointConnector", "Theirs"]


def test_other_commands_take_what_stands_in_a_file(production: str, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, engine_args=f"--config {production}")
    plan = own_plan(settings, ["--seed", "7"], ["conserve"], CPU, tmp_path / "store", seed=0)
    assert copies_bytes(plan.connector) == host_bytes(None) // 4
    endpoint: Any = make_endpoint(settings, ["--seed", "7"], ProfileFlags(), say=print)
    for flags in (plan.flags, endpoint._engine_flags):
        assert ("--config" in flags, value_of(flags, "--seed")) == (False, "7")
        assert names_format(flags)
    assert value_of(plan.flags, "--max-model-len") == "8k", "the preset has another"
    assert asked_length(["--config", production]) == 8000
    assert number_format(settings).value == f"as CONSERVE_ENGINE_ARGS says: --config {production}"
    missing = number_format(replace(settings, engine_args="--config none.yaml"))
    assert (missing.ok, missing.fix) == (False, "correct CONSERVE_ENGINE_ARGS")
    assert "none.yaml cannot be read" in missing.value


def test_the_command_that_measures_a_profile_has_the_users_flags_alone() -> None:
    theirs = ["--kv-transfer-config", json.dumps({"kv_connector": "Theirs", "kv_role": "kv_both"})]
    address = ["--host", "127.0.0.1", "--port", "8000"]
    flags = [*with_checkpoints(["--seed", "7", *theirs], {"host_bytes": 5}), *address]
    assert shlex.split(profile_command("a/b", flags)) == [
        *("conserve", "profile", "--served", "a/b", "--", "--seed", "7"),
        *theirs,
    ]
    assert profile_command("m", [*with_checkpoints([], {}), *address]) == "conserve profile --served m"


def test_a_secret_is_hidden_in_every_spelling() -> None:
    assert (
        flags_of(("--hf_token=t", "--api-key", "a", "b", "--seed", "-1"))
        == "--hf_token=*** --api-key=*** --seed -1"
    )


@pytest.mark.parametrize("given", [("-pp", "2"), ("-pp=2",), ("--pipeline_parallel_size=2",)])
def test_stages_of_a_pipeline_are_not_eager(
    given: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conserve.engine.vllm.launching.flags._available_bytes", lambda: 8 << 30)
    model = str(tmp_path)  # anything else would be looked for on the hub, for 20 s
    assert "--enforce-eager" not in cpu_defaults(model, ["--dtype", "float32", *given])
    assert "--enforce-eager" in cpu_defaults(model, ["--dtype", "float32"])
