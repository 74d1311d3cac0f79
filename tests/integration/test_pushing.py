"""Rows of jobs that would miss their deadline use live requests' SLO up to a stated scale, and never more."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from conserve.bench.traces import Arrival
from tests.warned import OF_VLLM

pytestmark = [
    *OF_VLLM,
    pytest.mark.engine,
]
Make = Callable[..., Any]
TBT_MS = 40.0  # so short that rows gain by a push


@pytest.fixture
def make(tmp_path: Path, clock: Any) -> Make:
    def make(*, pushes: int, **section: Any) -> Any:
        """An engine with 400 rows; of every `pushes` one is of an urgent job, and none at 0."""
        from conserve.engine.vllm.simulation.engine import SimulatedEngine
        from tests.bare_scheduler import MODEL, engine_config

        said = {"policy": "conserve", "ttft_slo_ms": 2000, "tbt_slo_ms": TBT_MS, **section}
        config = engine_config(tmp_path, section=said, max_num_batched_tokens=1024)
        sizes = {"layers": 10, "num_blocks": 4096, "window": 8, "scatter": 0.0, "seed": 0}
        engine = SimulatedEngine(config, clock=clock, model=MODEL, offline=iter([(900, 3)] * 400), **sizes)
        plain, rows = engine.request, count()

        def request(*args: Any, **rest: Any) -> Any:
            urgent = rest.get("offline") and pushes and not next(rows) % pushes
            more = {"extra_args": {"conserve_push": 1}} if urgent else {}
            return plain(*args, **rest, **more)

        engine.request = request
        return engine

    return make


def longest_gap_ms(engine: Any) -> float:
    engine.go_on_until(engine.clock.now + 1.0)
    (answer,) = engine.play([Arrival(0.1, 100, 30)])
    return float(max(answer.tbts_ms))


def pushing(engine: Any) -> dict[str, float]:
    found: dict[str, float] = engine.scheduler.conserve()["pushing"]
    return found


@pytest.mark.parametrize("every", [1, 3])
def test_urgent_rows_use_the_scale_and_others_the_promise(make: Make, every: int) -> None:
    assert 0.8 * TBT_MS < longest_gap_ms(make(pushes=0, push_slo_scale=1.5)) <= TBT_MS * 1.01
    engine = make(pushes=every, push_slo_scale=1.5)
    assert 1.2 * TBT_MS < longest_gap_ms(engine) <= 1.5 * TBT_MS * 1.01
    said = pushing(engine)
    assert (said["largest_slo_scale"], said["slo_scale"]) == (1.5, 1.5)
    assert said["rows"] > 0
    assert 0 < said["tokens"] < engine.offline_tokens


def test_without_a_scale_urgent_rows_push_nothing(make: Make) -> None:
    engine = make(pushes=1)
    assert longest_gap_ms(engine) <= TBT_MS * 1.01
    assert pushing(engine)["tokens"] == 0


def test_a_harm_grows_by_the_scale(make: Make) -> None:
    """A gap of 20 % more than alone, at a scale of 1.5, is one of 80 % more."""
    promised = {"ttft_slo_ms": None, "tbt_slo_ms": None, "harm": 0.2, "push_slo_scale": 1.5}
    own, pushed = (longest_gap_ms(make(pushes=pushes, **promised)) for pushes in (0, 1))
    assert 1.2 < pushed / own <= 1.53


def test_once_the_urgent_rows_are_gone_the_promise_holds_again(make: Make) -> None:
    from vllm.v1.request import RequestStatus

    engine = make(pushes=1, push_slo_scale=2.0)
    longest_gap_ms(engine)
    rows = [request for name, request in engine.scheduler.requests.items() if name.startswith("off")]
    assert pushing(engine)["rows"] == len(rows)
    engine.scheduler.finish_requests([row.request_id for row in rows], RequestStatus.FINISHED_ABORTED)
    said = pushing(engine)
    assert (said["largest_slo_scale"], said["slo_scale"], said["rows"]) == (2.0, 1.0, 0)
