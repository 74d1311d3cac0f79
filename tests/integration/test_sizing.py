"""The rate that the machine's speed sets, on vLLM's real scheduler: busy as foretold, on fast and slow machines."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conserve.bench.arrivals import arrivals
from conserve.bench.compare import Design
from conserve.bench.presets import CPU
from conserve.bench.simulate_online import EngineModel
from conserve.bench.sizing import Sized, size
from conserve.names import NON_PREEMPTIVE, ONLINE_ONLY, PRIORITY
from conserve.profiles.conserve import ConServeModel
from tests.benchmarks.simulation import DEMO, FASTER
from tests.warned import OF_VLLM

pytestmark = [
    *OF_VLLM,
    pytest.mark.engine,
]

FLAGS = {"max_num_batched_tokens": 2048, "max_model_len": 2048, "max_num_seqs": 128, "block_size": 64}
BLOCKS = 360  # of 64 tokens: 1 GiB
POLICIES = [ONLINE_ONLY, "conserve", NON_PREEMPTIVE, PRIORITY]
Played = Callable[[Sized, EngineModel], list[float]]


@pytest.fixture
def played(tmp_path: Path, clock: Any) -> Played:
    """Plays the rounds under online-only; returns the share of each block that the engine was busy."""

    def play(sized: Sized, engine: EngineModel) -> list[float]:
        from conserve.engine.vllm.simulation.engine import SimulatedEngine
        from tests.bare_scheduler import engine_config, known_times

        class Watched(SimulatedEngine):
            def go_on_until(self, moment: float) -> None:
                super().go_on_until(moment)
                self.seen = (self.clock.now, self.scheduler.conserve()["busy_s"])

        section, times = {"policy": ONLINE_ONLY}, known_times(engine.model)
        watched = Watched(
            engine_config(tmp_path, section=section, times=times, **FLAGS),
            clock=clock,
            model=engine.model,
            layers=1,
            num_blocks=BLOCKS,
            offline=iter([(500, 20)] * 1000),
            window=CPU.offline_window or 1,
            scatter=0.02,
            seed=0,
        )
        shares = []
        for number in range(sized.design.rounds):
            began, before = clock.now, watched.scheduler.conserve()["busy_s"]
            watched.play(sized.source(number), sized.design.block_s)
            ended, after = watched.seen  # with the iteration that was under way, as the bench's reading is
            shares.append((after - before) / (ended - began))
        return shares

    return play


def slower(times: float) -> EngineModel:
    """On a machine so many times slower than that of docs/benchmarks."""
    model = ConServeModel.of(*(times * ms / FASTER for ms in DEMO))
    return EngineModel(model=model, max_tokens=2048, max_requests=128)


@pytest.mark.parametrize(
    ("times", "trace"),
    [*((times, "azure_code_2023_10min_bursty") for times in (1, 5, 30)), (5, "azure_conv_2023_10min")],
)
def test_the_engine_is_half_busy_however_slow_the_machine(played: Played, times: float, trace: str) -> None:
    engine = slower(times)
    offered = arrivals(CPU, trace, None, None, None, None, None, 0, given={})
    sized = size(offered, CPU, Design(policies=POLICIES, rounds=CPU.rounds, block_s=CPU.block_s), engine)
    shares = played(sized, engine)
    assert 0.45 <= sum(shares) / len(shares) <= 0.6
    for share, forecast in zip(shares, sized.forecasts, strict=True):
        assert share == pytest.approx(forecast.busy, abs=0.04)


def test_the_scheduler_tells_the_speed_that_the_rate_is_set_by(tmp_path: Path, clock: Any) -> None:
    from tests.bare_scheduler import BareEngine, engine_config, known_times

    model = slower(5).model
    config = engine_config(tmp_path, section={}, times=known_times(model), **FLAGS)
    said = BareEngine(config, clock=clock).scheduler.conserve()
    told = {"name": "conserve", "coefficients": model.coefficients, "scale": 1.0}
    assert said["latency_model"].items() >= told.items()
    assert said["max_num_batched_tokens"] == FLAGS["max_num_batched_tokens"]
