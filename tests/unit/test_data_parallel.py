"""Several engines behind one front end: every one is asked, and their reports become one."""

import asyncio
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conserve.cli import serve_flags
from conserve.engine.vllm.launching.flags import engines_of
from conserve.engine.vllm.preemption.reasons import why_not
from conserve.engine.vllm.profiling.learning import scheduler_says
from conserve.engine.vllm.requests.data_parallel import (
    ask_engines,
    most_requests,
    number_of_engines,
    together,
)
from conserve.engine.vllm.settings import WORKER
from conserve.errors import SettingsError
from tests import virtual_time


def latencies(p50: float | None, p99: float | None) -> dict[str, float | None]:
    return {"p50": p50, "p99": p99}


def live(
    requests: int,
    ttft: tuple[float | None, float | None],
    *,
    attainment: float = 1.0,
    held_back: Sequence[str] = (),
    paused_for: Sequence[str] = (),
) -> dict[str, Any]:
    """Figures of live requests; P99 of TTFT is promised to be at most a second."""
    seen_ms = ttft[1]
    counts = [requests, 0]
    return {
        "requests": requests,
        "ttft_ms": latencies(*ttft),
        "tbt_ms": latencies(None, None),
        "attainment": attainment,
        "held_back": list(held_back),
        "paused_for": list(paused_for),
        "way_ms": {"ttft_ms": {"p99": 7.0}, "tbt_ms": {}},
        "promises": {
            "ttft_ms": {
                "p99": {
                    "promised_ms": 1000.0,
                    "seen_ms": seen_ms,
                    "kept": seen_ms is None or seen_ms <= 1000.0,
                }
            },
            "tbt_ms": {},
        },
        "counts": {name: {"all": requests, "late": 1} for name in ("ttft_ms", "tbt_ms")},
        "histograms": {
            name: {"bounds_ms": [1000.0], "counts": counts, "sum_ms": 10.0 * requests}
            for name in ("ttft_ms", "tbt_ms")
        },
    }


def said(
    *, online: Mapping[str, Any], alone_ms: float | None = 50.0, offline: int = 0, pauses: int = 0
) -> dict[str, Any]:
    """One engine's report, in the fields that matter here."""
    return {
        "policy": "conserve",
        "refused_plans": {"count": offline, "reasons": ["it was late", f"it took {offline}"]},
        "slo": {"ttft_ms": 1000.0},
        "alone": None if alone_ms is None else {"prompt_tokens": 128, "ttft_ms": alone_ms, "tbt_ms": 5.0},
        "latency_model": None if alone_ms is None else {"scale": alone_ms / 50, "off": {"iterations": 7}},
        "max_num_batched_tokens": 512,
        "online": online,
        "offline": {"tokens": offline, "tokens_per_s": offline / 10, "work": offline * 1.5},
        "harm": {"pauses": pauses, "compared": 4 * pauses, "ttft_ms": {"p50": f"of {pauses}"}},
        "pushing": {
            "largest_slo_scale": 2.0,
            "slo_scale": 2.0 if offline else 1.0,
            "rows": 1,
            "tokens": offline,
        },
        "live_prefixes": {
            "share": 0.5,
            "kept_blocks": offline,
            "most_age_s": pauses + 0.5,
            "found_tokens": 10,
        },
        "iterations": 100,
        "planned": 50,
        "overruns": 1,
        "standstills": 2,
        "busy_s": 2.5,
        "preemption": {
            "policy": "prompt",
            "why_off": None,
            "rows_go_on": True,
            "rows": offline,
            "tokens_wasted": 0.5,
            "reaction_ms": latencies(*((1.0, 9.0) if offline else (None, None))),
        },
        "checkpoint": {
            "policy": "adaptive",
            "why_off": None,
            "refused_choices": {"count": 0, "reasons": []},
            "blocks_saved": offline,
            "host_blocks": 64,
            "block_ms": {"to_host": 0.25, "to_device": 0.5},
            "spill": None,
        },
    }


def test_counts_are_added_and_latencies_are_those_of_the_worst_engine() -> None:
    one = said(
        online=live(3, (20.0, 1200.0), attainment=0.6, held_back=["ttft_ms"], paused_for=["ttft_ms"]),
        offline=100,
        pauses=1,
    )
    two = said(online=live(5, (30.0, 900.0)), alone_ms=80.0, offline=40, pauses=2)
    idle = said(online=live(0, (None, None)))
    kept = deepcopy([one, two, idle])
    whole = together([one, two, idle])
    assert [one, two, idle] == kept, "no report is changed"
    assert whole.keys() == one.keys()
    online = whole["online"]
    assert online["requests"] == 8
    assert online["ttft_ms"] == latencies(30.0, 1200.0)
    assert online["tbt_ms"] == latencies(None, None)
    assert online["attainment"] == 0.6
    assert online["held_back"] == online["paused_for"] == ["ttft_ms"]
    assert online["way_ms"]["ttft_ms"] == {"p99": 7.0}, "of the API server, for all engines"
    assert online["promises"]["ttft_ms"] == {"p99": {"promised_ms": 1000.0, "seen_ms": 1200.0, "kept": False}}
    assert online["counts"]["ttft_ms"] == {"all": 8, "late": 3}
    assert online["histograms"]["ttft_ms"] == {"bounds_ms": [1000.0], "counts": [8, 0], "sum_ms": 80.0}
    assert whole["offline"] == {"tokens": 140, "tokens_per_s": 14.0, "work": 210.0}
    names = ("iterations", "planned", "overruns", "standstills", "busy_s")
    assert [whole[name] for name in names] == [300, 150, 3, 6, 7.5]
    assert whole["preemption"]["rows"] == 140
    assert whole["preemption"]["tokens_wasted"] == 1.5
    assert whole["preemption"]["reaction_ms"] == latencies(1.0, 9.0)
    assert whole["checkpoint"]["blocks_saved"] == 140
    assert whole["checkpoint"]["host_blocks"] == 192
    assert whole["checkpoint"]["block_ms"] == {"to_host": 0.25, "to_device": 0.5}
    assert whole["pushing"] == {"largest_slo_scale": 2.0, "slo_scale": 2.0, "rows": 3, "tokens": 140}
    prefixes = {"share": 0.5, "kept_blocks": 140, "most_age_s": 2.5, "found_tokens": 30}
    assert whole["live_prefixes"] == prefixes
    assert whole["refused_plans"]["count"] == 140
    assert whole["refused_plans"]["reasons"] == ["it was late", "it took 100", "it took 40", "it took 0"]
    assert whole["harm"] == {"pauses": 3, "compared": 12, "ttft_ms": {"p50": "of 2"}}
    assert (whole["alone"], whole["latency_model"]) == (two["alone"], two["latency_model"]), "the slowest"
    assert whole["max_num_batched_tokens"] == 512, "of one iteration"


def test_classes_are_put_together_each_on_its_own() -> None:
    one, two = (said(online=live(n, (20.0 * n, 30.0 * n))) for n in (1, 2))
    for n, report in ((1, one), (2, two)):
        report["classes"] = {
            name: {"slo": {"ttft_ms": 9.0}, **live(n * k, (k, n))} for k, name in enumerate(("a", "b"))
        }
    classes = together([one, two])["classes"]
    assert [*classes] == ["a", "b"]
    assert classes["b"]["slo"] == {"ttft_ms": 9.0}
    assert (classes["a"]["requests"], classes["b"]["requests"]) == (0, 3)
    assert classes["b"]["ttft_ms"] == latencies(1, 2)


@pytest.mark.parametrize("late", [0, 1])
def test_there_is_a_latency_model_once_every_engine_has_one(late: int) -> None:
    reports = [said(online=live(0, (None, None)), alone_ms=None if late == n else 50.0) for n in range(2)]
    whole = together(reports)
    assert (whole["alone"], whole["latency_model"]) == (None, None)
    reports[late] = reports[1 - late]
    assert together(reports)["latency_model"] is not None


@pytest.mark.parametrize("which", [0, 1])
def test_rows_stay_if_they_stay_on_one_engine(which: int) -> None:
    reports = [said(online=live(0, (None, None)), offline=1) for _ in range(2)]
    section = reports[which]["preemption"]
    section.update(policy="off", why_off="the model has no safepoints", rows_go_on=False)
    found = together(reports)["preemption"]
    assert found["policy"] == "off"
    assert found["why_off"] == "the model has no safepoints"
    assert found["rows_go_on"] is False
    assert found["rows"] == 2


def test_the_report_of_one_engine_is_its_own() -> None:
    report = said(online=live(3, (20.0, 30.0)), offline=7)
    assert together([report]) == report


class Front:
    """A front end of engines that answer with their reports; keeps who was asked what."""

    def __init__(self, reports: Sequence[dict[str, Any] | None]) -> None:
        self.engine_core = self
        self.core_engines = [bytes([n]) for n in range(len(reports))]
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=16))
        self.asked: list[tuple[str, Any, bytes]] = []
        self._reports = reports

    async def _call_utility_async(self, method: str, *arguments: Any, engine: bytes) -> Any:
        self.asked.append((method, *arguments, engine))
        await asyncio.sleep(1.0 / (1 + engine[0]))  # the first is the last to answer
        return self._reports[engine[0]]


def test_every_engine_is_asked_and_told() -> None:
    front: Any = Front([said(online=live(n, (20.0, 30.0))) for n in (1, 2, 4)])
    change = {"slo": {"ttft_ms": 500.0}}
    answers = virtual_time.run(ask_engines(front, "conserve", change))
    assert [one["online"]["requests"] for one in answers] == [1, 2, 4]
    assert sorted(front.asked, key=lambda one: one[2]) == [("conserve", change, bytes([n])) for n in range(3)]
    found = virtual_time.run(scheduler_says(front))
    assert found is not None
    assert found["online"]["requests"] == 7
    assert (number_of_engines(front), most_requests(front)) == (3, 48)


def test_another_scheduler_says_nothing() -> None:
    front: Any = Front([None, None])
    assert virtual_time.run(scheduler_says(front)) is None


@pytest.mark.parametrize(
    ("flags", "engines"),
    [
        ([], 1),
        (["--data-parallel-size", "2"], 2),
        (["--dtype", "float32", "--data_parallel_size=4"], 4),
        (["-dp", "3"], 3),
        (["-dp", "3", "--data-parallel-size", "2"], 2),
        (["--data-parallel-size", "many"], 1),
        (["--data-parallel-size"], 1),
        (["--data-parallel-size-local", "2"], 1),
    ],
)
def test_the_number_of_engines_by_the_flags(flags: list[str], engines: int) -> None:
    assert engines_of(flags) == engines


def test_kv_on_disk_is_for_one_engine() -> None:
    with pytest.raises(SettingsError) as refused:
        serve_flags.checkpointing(["-dp", "2"], "adaptive", None, Path("spill"))
    page = (Path(__file__).parents[2] / "docs/reference/modes.md").read_text()
    assert str(refused.value) == "--kv-spill is for one engine, not for --data-parallel-size 2; leave it out"
    assert str(refused.value) in page
    assert serve_flags.checkpointing(["-dp", "1"], "adaptive", "64MiB", Path("spill"))


def test_engines_share_the_host_memory() -> None:
    def host_bytes(*flags: str) -> str:
        return serve_flags.checkpointing([*flags], "adaptive", "64MiB")[-1]

    assert f'"host_bytes": {64 << 20}}}' in host_bytes()
    assert f'"host_bytes": {16 << 20}}}' in host_bytes("--data-parallel-size", "4")


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_profile_is_of_one_engine() -> None:
    from conserve.engine.vllm.profiling.rig import keep_one_engine

    for size, experts in ((1, False), (1, True), (2, False), (2, True)):
        made: list[bool] = []
        parallel = SimpleNamespace(
            data_parallel_size=size, reconfigure_for_independent_dp_rank=partial(made.append, True)
        )
        config: Any = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(is_moe=experts))
        if size == 2 and experts:
            with pytest.raises(SettingsError, match="leave out --data-parallel-size"):
                keep_one_engine(config)
        else:
            keep_one_engine(config)
        assert made == [True] * (size == 2 and not experts)


@pytest.mark.parametrize(
    ("size", "experts", "why"),
    [
        (1, True, None),
        (2, False, None),
        (2, True, "data parallel engines wait for each other"),
    ],
)
def test_rows_stay_where_engines_run_in_lockstep(size: int, experts: bool, why: str | None) -> None:
    model = SimpleNamespace(
        is_moe=experts,
        is_hybrid=False,
        is_attention_free=False,
        is_encoder_decoder=False,
        runner_type="generate",
    )
    config = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(worker_cls=WORKER, pipeline_parallel_size=1, data_parallel_size=size),
        speculative_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        scheduler_config=SimpleNamespace(async_scheduling=False),
        use_v2_model_runner=False,
    )
    assert why_not(config) == why
