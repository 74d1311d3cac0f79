"""Notes of an iteration are made while the next one runs, and before anything needs them."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.warned import OF_VLLM

pytestmark = [pytest.mark.engine, *OF_VLLM]


class Owing:
    """An engine whose last iteration is still to be noted, as it is between two iterations of vLLM's engine."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.scheduler = engine, engine.scheduler
        for _ in range(3):
            self.engine.add(40, 200, offline=True)
        list(self.steps(3))
        self.live = self.engine.add(40, 100)
        list(self.steps(3))

    def steps(self, count: int) -> Any:
        """Run iterations; yield the output of each before its results are taken in."""
        for _ in range(count):
            output = self.engine.start()
            yield output
            self.scheduler.update_from_output(output, self.engine.result(output))

    @property
    def gaps(self) -> int:
        """Live gaps between tokens that were noted."""
        return sum(moment.times for moment in self.scheduler.traffic._default.tbt_ms)


@pytest.fixture
def owing(tmp_path: Path, clock: Any) -> Owing:
    from tests.bare_scheduler import BareEngine, engine_config

    section = {"policy": "conserve", "harm": 1e-4}
    return Owing(BareEngine(engine_config(tmp_path, section=section), num_blocks=4096, clock=clock))


def test_an_iteration_is_noted_while_the_next_one_runs(owing: Owing) -> None:
    noted, gaps = owing.scheduler.iterations.counted, owing.gaps
    (_,) = owing.steps(1)
    assert (owing.scheduler.iterations.counted, owing.gaps) == (noted + 1, gaps + 1), (
        "the one before it alone"
    )


@pytest.mark.parametrize(
    "reads",
    [
        lambda owing: owing.scheduler.conserve(),
        lambda owing: owing.engine.add(10, 1),
        lambda owing: owing.scheduler.shutdown(),
        lambda owing: owing.scheduler._plan_by_policy(owing.scheduler.iterations.model),
    ],
    ids=["report", "arrival", "end", "look"],
)
def test_it_is_noted_before_anything_needs_it(owing: Owing, reads: Callable[[Owing], Any]) -> None:
    gaps = owing.gaps
    reads(owing)
    assert owing.gaps == gaps + 1
    assert owing.scheduler.traffic.online_now >= 1


@pytest.mark.parametrize(
    "waits",
    [
        lambda owing: owing.scheduler._plan_by_policy(owing.scheduler.iterations.model),
        lambda owing: owing.engine.add(10, 1),
    ],
    ids=["look", "arrival"],
)
def test_what_live_requests_wait_for_notes_latencies_alone(
    owing: Owing, waits: Callable[[Owing], Any]
) -> None:
    gaps, learned = owing.gaps, owing.scheduler.iterations.counted
    waits(owing)
    assert (owing.gaps, owing.scheduler.iterations.counted) == (gaps + 1, learned)
    owing.scheduler.conserve()
    assert (owing.gaps, owing.scheduler.iterations.counted) == (gaps + 1, learned + 1)


def test_a_view_has_what_live_requests_add_to_iterations_and_one_answer_adds_next_to_nothing(
    owing: Owing,
) -> None:
    """Rows beside an answer that does not end would else have no time for ever."""
    from conserve.engine.vllm.scheduling.observation import Picture

    busy = owing.scheduler.traffic.live_busy
    list(owing.steps(50))
    assert busy._live_s > 0
    assert busy.share < 0.2
    live_s = busy._live_s
    busy.note(9 * live_s, 9 * live_s)  # prompts, as they queue
    view = Picture(owing.scheduler, owing.scheduler.traffic, surcharge_ms=0.0).view(
        owing.scheduler.slo, owing.scheduler.iterations.model
    )
    assert view.live_busy == busy.share > 0.8
    owing.engine.abort([owing.live])
    list(owing.steps(2))  # the last with the live request is noted
    counted = busy._live_s
    list(owing.steps(30))
    assert busy._live_s == counted, "rows are no live requests"


def test_a_request_that_ends_is_forgotten_with_its_last_token(owing: Owing) -> None:
    while not owing.live.is_finished():
        list(owing.steps(1))
    assert owing.scheduler.traffic.online_now == 1, "until the next iteration runs"
    list(owing.steps(1))
    assert owing.scheduler.traffic.online_now == 0
    assert owing.gaps == 99


def test_times_are_those_of_the_iteration_and_not_of_its_note(owing: Owing, clock: Any) -> None:
    (_,) = owing.steps(1)
    ended = clock.now
    clock.now += 5.0  # nothing came for so long
    owing.scheduler.books.catch_up()
    newest = owing.scheduler.traffic._default.tbt_ms[-1]
    assert newest.at == pytest.approx(ended)


@pytest.mark.parametrize(("backend", "counts"), [("uni", True), ("mp", False)])
def test_notes_are_own_time_only_where_the_model_runs_on_the_same_thread(
    owing: Owing, monkeypatch: pytest.MonkeyPatch, clock: Any, backend: str, counts: bool
) -> None:
    from conserve.engine.vllm.scheduling import own_time

    monkeypatch.setattr(own_time, "time", clock)
    parallel = SimpleNamespace(pipeline_parallel_size=1, distributed_executor_backend=backend)
    owing.scheduler.own_time = own_time.OwnTime.of(parallel)
    catch_up = owing.scheduler.books.catch_up

    def slowly() -> None:
        clock.now += 0.5
        catch_up()

    output = owing.engine.scheduler.schedule()
    monkeypatch.setattr(owing.scheduler.books, "catch_up", slowly)
    owing.scheduler.get_grammar_bitmask(output)
    assert owing.scheduler.own_time._spent_s == pytest.approx(0.5 * counts)
