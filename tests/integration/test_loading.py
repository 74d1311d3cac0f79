"""The engine's library loads in a process of its own, as `conserve doctor` has it."""

import os
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from conserve.engine.runtime.machine import BINDING, RESERVED
from conserve.engine.runtime.vllm_flags import ALONE, spelled_out
from conserve.engine.vllm.launching import loading
from conserve.engine.vllm.launching.loading import Loading
from conserve.errors import SettingsError
from tests.warned import OF_VLLM

pytestmark = [
    *OF_VLLM,
]


@pytest.mark.engine
def test_the_library_that_is_loaded_names_its_device(capsys: pytest.CaptureFixture[str]) -> None:
    loading.main()
    loaded = loading.told(capsys.readouterr().out, 1.0)
    assert (loaded.device, loaded.faults) == ("cpu", ())
    assert loaded.names


@pytest.mark.engine
@pytest.mark.full
def test_the_library_loads_and_names_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LOAD_S", 600.0)
    with Loading() as process:
        loaded = process.outcome()
    assert (loaded.problem, loaded.device) == (None, "cpu")


@pytest.mark.engine
def test_the_command_for_missing_kernels_loads_those_of_the_platform(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    from vllm.platforms import current_platform

    monkeypatch.setattr(torch._C, "_dispatch_get_all_op_names", list)
    with pytest.raises(ImportError, match="its kernels are missing; run: python -c") as missing:
        loading.main()
    *_, code = shlex.split(str(missing.value))
    loaded: list[str] = []
    monkeypatch.setattr(type(current_platform), "import_kernels", lambda _: loaded.append("kernels"))
    exec(code, {})
    assert loaded == ["kernels"]


@pytest.mark.engine
@pytest.mark.full
def test_a_library_without_kernels_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM itself only logs that its kernels are missing."""
    missing = "import sys; sys.modules |= dict.fromkeys(('vllm._C', 'vllm._C_AVX2', 'vllm._C_AVX512'))"
    code = f"{missing}; from conserve.engine.vllm.launching.loading import main; main()"
    monkeypatch.setattr(loading, "WORDS", ("-c", code))
    monkeypatch.setattr(loading, "LOAD_S", 600.0)
    with Loading() as process:
        assert "its kernels are missing" in (process.outcome().problem or "")


@pytest.mark.engine
def test_the_printed_command_serves_as_conserve_serve_would(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reads the same arguments from it, and its scheduler the same settings."""
    from conserve.engine.section import EngineSection
    from conserve.engine.vllm.launching import flags as launching
    from conserve.engine.vllm.launching.environment import OUTPUTS
    from conserve.engine.vllm.server.printed import VLLM_CPU, command_of
    from conserve.engine.vllm.server.process import arguments, parsed
    from conserve.engine.vllm.settings import settings_of

    monkeypatch.setattr(
        launching, "_available_bytes", lambda: 8 << 30
    )  # other tests take some, and give it back
    for name in (RESERVED, OUTPUTS):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    flags = ["--max-model-len", "2048", "--port", "8123"]
    section = EngineSection(ttft_slo_ms=1500.0, control=True)
    printed = command_of(str(demo_model), flags, section, models_folder=demo_model.parent, keys=True)
    start, *words = shlex.split(printed.replace("\\\n", ""))
    assert [start, *words[:2]] == ["VLLM_PLUGINS=conserve", f"{OUTPUTS}=32", f"{RESERVED}=1"]
    assert [word.partition("=")[0] for word in words[2:4]] == ["VLLM_API_KEY", "CONSERVE_HARVEST_KEY"]
    words = words[4:]
    assert words[:4] == VLLM_CPU.split()
    read = vars(parsed(words[4:]))
    served = vars(arguments(str(demo_model), flags, section, models_folder=demo_model.parent))
    assert {name for name in served if read[name] != served[name]} == {
        "additional_config", "middleware", "scheduler_cls", "worker_cls",
    }  # fmt: skip
    assert (read["scheduler_cls"], read["worker_cls"]) == ("conserve.vllm.Scheduler", "conserve.vllm.Worker")
    ours = read["additional_config"]["conserve"]
    assert ours == {"ttft_slo_ms": 1500.0, "control": True, "profile": "auto"}
    cuts = SimpleNamespace(enable_chunked_prefill=True)
    model = SimpleNamespace(hf_config=SimpleNamespace())
    config = SimpleNamespace(additional_config={"conserve": ours}, scheduler_config=cuts, model_config=model)
    assert settings_of(config) == (replace(section, profile="auto"), None)


def test_rows_leave_under_our_worker_alone() -> None:
    from conserve.engine.vllm.preemption.reasons import why_not

    def config(worker: str) -> SimpleNamespace:
        return SimpleNamespace(
            parallel_config=SimpleNamespace(
                worker_cls=worker, pipeline_parallel_size=2, data_parallel_size=1
            ),
            model_config=SimpleNamespace(
                is_hybrid=False, is_attention_free=False, is_encoder_decoder=False, runner_type="generate"
            ),
            scheduler_config=SimpleNamespace(async_scheduling=False),
            speculative_config=None,
            kv_transfer_config=None,
            ec_transfer_config=None,
        )

    assert why_not(config("conserve.vllm.Worker")) == "the pipeline is parallel"
    assert "--worker-cls" in (why_not(config("other.Worker")) or "")


@pytest.mark.engine
@pytest.mark.parametrize("users", [None, "0"])
@pytest.mark.parametrize("connector", ["none", "ours", "another", "both"])
def test_a_server_leaves_the_cores_free_that_it_would_without_our_connector(
    few_layers: Path, monkeypatch: pytest.MonkeyPatch, connector: str, users: str | None
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    from conserve.engine.vllm.checkpoint.kv_transfer import FLAG, with_checkpoints
    from conserve.engine.vllm.launching.flags import configured
    from conserve.engine.vllm.server.process import parsed

    def reserved(flags: list[str]) -> int:
        monkeypatch.setenv(RESERVED, "")
        monkeypatch.delenv(RESERVED)
        if users is not None:
            monkeypatch.setenv(RESERVED, users)
        args = AsyncEngineArgs.from_cli_args(parsed([str(few_layers), "--max-model-len", "256", *flags]))
        cores: int = OMPProcessManager(configured(args, served=True)).reserve_cpu_num
        return cores

    others = [FLAG, '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}']
    theirs = others if connector in ("another", "both") else []
    flags = with_checkpoints(theirs, {}) if connector in ("ours", "both") else theirs
    vllms_own = 2 if theirs else 1
    assert reserved(flags) == (vllms_own if users is None else int(users))


@pytest.mark.parametrize("binding", ["nobind", "0-1|2-3"])
def test_no_core_is_reserved_where_threads_are_bound(monkeypatch: pytest.MonkeyPatch, binding: str) -> None:
    from conserve.engine.vllm.launching.flags import reserve_cores

    monkeypatch.setenv(RESERVED, "")
    monkeypatch.delenv(RESERVED)
    monkeypatch.setenv(BINDING, binding)
    unread: Any = None
    reserve_cores(unread)
    assert RESERVED not in os.environ


@pytest.mark.engine
@pytest.mark.parametrize("simulated", ["0", "1"])
def test_each_of_several_engines_leaves_a_core_free(
    few_layers: Path, monkeypatch: pytest.MonkeyPatch, simulated: str
) -> None:
    """The front end, which asks, is none of them."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from conserve.engine.vllm.launching.flags import configured
    from conserve.engine.vllm.server.process import parsed

    monkeypatch.setenv(RESERVED, "")
    monkeypatch.delenv(RESERVED)
    monkeypatch.setenv("VLLM_CPU_SIM_MULTI_NUMA", simulated)
    words = [str(few_layers), "--max-model-len", "256", "--data-parallel-size", "2"]
    config = configured(AsyncEngineArgs.from_cli_args(parsed(words)), served=True)
    assert config.parallel_config.data_parallel_rank_local is None
    assert os.environ[RESERVED] == "1"


@pytest.mark.engine
def test_a_file_of_flags_is_read_as_vllm_reads_it(tmp_path: Path) -> None:
    from argparse import _StoreTrueAction

    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from conserve.engine.vllm.compat.versions import internal
    from conserve.engine.vllm.launching.flags import CLI_ARGS
    from conserve.engine.vllm.server.process import parsed

    parser = internal(f"{CLI_ARGS}.make_arg_parser")(FlexibleArgumentParser())
    switches = {
        action.option_strings[0] for action in parser._actions if isinstance(action, _StoreTrueAction)
    }
    assert switches == set(ALONE)
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "enable-prefix-caching: false\ngrpc: false\nmiddleware: []\nserved-model-name: [a, b]\nseed: 3\n"
        "compilation-config: {mode: 0}\ntrust-remote-code: true\n"
    )
    given = ["--max-model-len", "256", "--config", str(file), "--seed", "4"]
    assert vars(parsed(["model", *given])) == vars(parsed(["model", *spelled_out(given)]))


@pytest.mark.engine
def test_an_engine_is_profiled_with_the_flags_that_it_is_served_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from conserve.engine.vllm.launching import flags as launching

    monkeypatch.setattr(launching, "_available_bytes", lambda: 8 << 30)
    servers = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--port", "8000"]
    flags = ["--dtype", "float32", *servers, "--seed", "7"]
    assert launching.parse_flags(str(tmp_path), flags, served=True).seed == 7
    with pytest.raises(SettingsError, match="unrecognized arguments: --enable-auto-tool-choice"):
        launching.parse_flags(str(tmp_path), flags)
    with pytest.raises(SettingsError, match="unrecognized arguments: --sed 7"):
        launching.parse_flags(str(tmp_path), ["--dtype", "float32", "--sed", "7"], served=True)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-model-lenn", "3"], "--max-model-lenn"),
        (["--max-model-len", "abc"], "invalid .* value: 'abc'"),
    ],
)
def test_a_mistyped_flag_of_a_server_is_one_sentence(flags: list[str], said: str) -> None:
    from conserve.engine.vllm.server.process import parsed

    with pytest.raises(SettingsError, match=f"vLLM does not take these engine flags: .*{said}") as refused:
        parsed(["model", *flags])
    assert "\n" not in str(refused.value)
