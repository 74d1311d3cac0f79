"""Classes of live traffic on vLLM's scheduler: a flood of one does not hold up another, and each keeps its TBT."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from conserve.bench.traces import Arrival
from conserve.engine.policy.recorded import read
from tests.warned import OF_VLLM

pytestmark = [
    *OF_VLLM,
    pytest.mark.engine,
]

CLASSES = {
    "chat": {"ttft_slo_ms": 1000, "tbt_slo_ms": 100},
    "agent": {"ttft_slo_ms": 20_000, "tbt_slo_ms": 400},
}
Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path, clock: Any) -> Make:
    def make(classes: Any = None, *, rows: int = 0, **more: Any) -> Any:
        from conserve.engine.vllm.simulation.engine import SimulatedEngine
        from tests.bare_scheduler import MODEL, engine_config

        section = {"policy": "conserve", "ttft_slo_ms": 1000, "tbt_slo_ms": 400, **more}
        section |= {"classes": classes} if classes else {}
        config = engine_config(tmp_path, section=section, max_num_batched_tokens=1024)
        offline = iter([(900, 3)] * rows)
        sizes = {"layers": 10, "num_blocks": 4096, "window": 8, "scatter": 0.0, "seed": 0}
        return SimulatedEngine(config, clock=clock, model=MODEL, offline=offline, **sizes)

    return make


def play(engine: Any, arrivals: Iterable[tuple[Arrival, str | None]]) -> list[Any]:
    """Play requests of these classes; their answers in order."""
    named = iter([one for _, one in arrivals])
    plain = engine.request

    def request(*args: Any, **rest: Any) -> Any:
        if rest.get("offline"):
            return plain(*args, **rest)
        one = next(named, None)
        return plain(*args, **rest, extra_args={"conserve_class": one} if one else None)

    engine.request = request
    try:
        return list(engine.play([arrival for arrival, _ in arrivals]))
    finally:
        engine.request = plain


FLOOD = [(Arrival(0.01 * n, 900, 2), "agent") for n in range(40)]  # prompts of 300 ms each, 12 s together
CHATS = [(Arrival(1.0 + n, 100, 8), "chat") for n in range(5)]


def chats(engine: Any, *, classified: bool) -> list[Any]:
    arrivals = [(arrival, one if classified else None) for arrival, one in (*FLOOD, *CHATS)]
    return play(engine, arrivals)[len(FLOOD) :]


def test_a_flood_of_one_class_does_not_hold_up_another(make: Make) -> None:
    together = chats(make(), classified=False)
    assert max(answer.ttft_ms for answer in together) > 5000, "without classes they wait for the whole queue"
    engine = make(CLASSES)
    apart = chats(engine, classified=True)
    assert max(answer.ttft_ms for answer in apart) <= 1000
    said = engine.scheduler.conserve()["classes"]
    assert said["chat"]["requests"] == len(CHATS)
    assert said["agent"]["requests"] == len(FLOOD)
    assert said["default"]["requests"] == 0
    assert said["chat"]["attainment"] == 1.0
    assert said["chat"]["promises"]["ttft_ms"]["p99"]["kept"]


def test_each_class_bounds_the_iterations_that_its_requests_decode_in(make: Make) -> None:
    """Rows fill the iterations of an agent up to its TBT, and those of a chat up to the chat's."""
    engine = make(CLASSES, rows=400)
    engine.go_on_until(engine.clock.now + 1.0)
    chat, agent = (Arrival(0.1, 100, 20), "chat"), (Arrival(0.1, 100, 20), "agent")
    (fast,) = play(engine, [chat])
    assert max(fast.tbts_ms) <= 100 * 1.01
    (slow,) = play(engine, [agent])
    assert 100 < max(slow.tbts_ms) <= 400 * 1.01
    assert min(slow.tbts_ms[2:]) > 150, "rows use what the agent leaves"
    fast, slow = play(engine, [chat, agent])
    assert max(fast.tbts_ms) <= 100 * 1.01, "an iteration of both is bounded by both"


def test_classes_that_no_request_is_of_change_no_plan(make: Make, tmp_path: Path) -> None:
    promise = {"ttft_slo_ms": 1000, "tbt_slo_ms": 400}
    plans = []
    for place, classes in enumerate((None, {"chat": promise})):
        file = tmp_path / f"views-{place}.jsonl"
        engine = make(classes, rows=400, record_views=str(file))
        play(engine, [(Arrival(0.3 * n, 200, 6), None) for n in range(40)])
        engine.scheduler.shutdown()
        with_rows = [one for one in read(file) if one.view.offline or [*one.view.waiting_offline]]
        assert all(bool(one.view.slos) is bool(classes) for one in with_rows)
        plans.append([one.plan for one in with_rows])
    assert len(plans[0]) > 60
    assert plans[0] == plans[1]


def test_the_report_of_two_engines_says_all_that_one_engines_says(make: Make) -> None:
    from conserve.engine.vllm.requests.data_parallel import together

    def fields(said: Any) -> Any:
        return {name: fields(one) for name, one in said.items()} if isinstance(said, dict) else type(said)

    engine = make(CLASSES, rows=4)
    play(engine, CHATS)
    said = engine.scheduler.conserve()
    whole = together([said, said])
    assert fields(whole) == fields(said)
    chats, both = said["classes"]["chat"], whole["classes"]["chat"]
    assert chats["requests"] == len(CHATS)
    assert both["requests"] == 2 * len(CHATS)
    assert both["ttft_ms"] == chats["ttft_ms"]
    assert whole["offline"]["tokens"] == 2 * said["offline"]["tokens"] > 0
    assert (whole["latency_model"], whole["slo"]) == (said["latency_model"], said["slo"])
