"""Plans that are repeated while live requests decode beside rows that find no time."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.warned import OF_VLLM

pytestmark = [pytest.mark.engine, *OF_VLLM]
BLOCK = 16  # tokens
HARMLESS = {"harm": 1e-4}  # no row finds time beside a live request


class Looks:
    """An engine, and how often its scheduler was looked at."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from conserve.engine.vllm.scheduling.observation import Picture

        self.engine, self.scheduler, self.number = engine, engine.scheduler, 0
        view = Picture.view

        def counted(picture: Any, *args: Any) -> Any:
            self.number += 1
            return view(picture, *args)

        monkeypatch.setattr(Picture, "view", counted)

    def steps(self, count: int) -> Iterator[set[str]]:
        """Run iterations; yield the requests of each."""
        for _ in range(count):
            yield set(self.engine.step().num_scheduled_tokens)

    def beside_rows(self, rows: int = 3, tokens: int = 400) -> Any:
        """A live request that decodes while rows wait for it."""
        for _ in range(rows):
            self.engine.add(40, 200, offline=True)
        for _ in range(3):
            self.engine.step()
        live = self.engine.add(40, tokens)
        self.engine.step()
        return live


@pytest.fixture
def make(tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Looks]:
    from tests.bare_scheduler import BareEngine, engine_config

    def make(
        policy: str = "conserve", *, blocks: int = 4096, asynchronous: bool = False, **section: Any
    ) -> Looks:
        config = engine_config(tmp_path, section={"policy": policy, **HARMLESS, **section}, block_size=BLOCK)
        config.scheduler_config.async_scheduling = asynchronous
        return Looks(BareEngine(config, num_blocks=blocks, clock=clock), monkeypatch)

    return make


@pytest.mark.parametrize("policy", ["conserve", "online-only"])
def test_the_engine_is_looked_at_once_in_nine_iterations(make: Callable[..., Looks], policy: str) -> None:
    looks = make()
    live = looks.beside_rows()
    looks.scheduler.conserve({"policy": policy})
    looks.number = 0
    assert all(names == {live.request_id} for names in looks.steps(90))
    assert looks.number == 10


def test_what_is_repeated_is_what_the_model_hears_of(make: Callable[..., Looks]) -> None:
    from conserve.profiles.batch import Batch, Slice

    looks = make()
    live = looks.beside_rows()
    for _ in range(12):
        context = live.num_computed_tokens
        next(looks.steps(1))
        last = looks.scheduler.last_iteration
        batch = Batch.of([Slice(1, context, True)])
        assert (last.batch, last.tokens) == (batch, {live.request_id: 1})
        assert last.plan.predicted_ms == pytest.approx(
            looks.scheduler._iterations.model.predict(batch), rel=0.05
        )


def test_another_live_request_begins_at_once(make: Callable[..., Looks]) -> None:
    looks = make()
    live = looks.beside_rows()
    list(looks.steps(4))
    other = looks.engine.add(30, 5)
    assert next(looks.steps(1)) == {live.request_id, other.request_id}
    looks.engine.abort([live])
    another = looks.engine.add(30, 5)  # as many as before, but others
    assert another.request_id in next(looks.steps(1))


def test_rows_go_on_once_the_live_request_has_ended(make: Callable[..., Looks]) -> None:
    looks = make()
    live = looks.beside_rows(tokens=12)
    while not live.is_finished():
        assert next(looks.steps(1)) == {live.request_id}
    assert len(next(looks.steps(1))) == 3


def test_rows_go_on_once_a_promise_leaves_time(
    make: Callable[..., Looks], monkeypatch: pytest.MonkeyPatch
) -> None:
    from conserve.engine.policy.view import Slo

    looks = make()
    looks.beside_rows()
    list(looks.steps(3))
    monkeypatch.setattr(type(looks.scheduler), "_slo", Slo(harm=0.9))
    assert len(next(looks.steps(1))) == 4


def test_rows_give_up_their_memory_before_live_requests_lack_it(make: Callable[..., Looks]) -> None:
    looks = make(blocks=24)
    live = looks.beside_rows(rows=4, tokens=250)
    while not live.is_finished():
        next(looks.steps(1))
    assert not live.num_preemptions


def test_a_live_request_is_computed_before_the_rows_that_came_first(make: Callable[..., Looks]) -> None:
    looks = make()
    live = looks.beside_rows()
    assert looks.scheduler.running[0] is live


def test_each_iteration_is_planned_where_views_are_recorded(
    make: Callable[..., Looks], tmp_path: Path
) -> None:
    looks = make(record_views=str(tmp_path / "views.jsonl"))
    looks.beside_rows()
    looks.number = 0
    list(looks.steps(10))
    looks.scheduler._recordings.close()
    assert looks.number == 10


def test_nothing_is_repeated_where_iterations_are_scheduled_ahead(make: Callable[..., Looks]) -> None:
    looks = make(asynchronous=True)
    looks.beside_rows()
    assert not looks.scheduler._repetition._left


def test_a_plan_that_others_followed_is_not_repeated(make: Callable[..., Looks]) -> None:
    """Else its contexts would be those of long ago."""
    from conserve.profiles.batch import Batch, Slice

    looks = make()
    live = looks.beside_rows(rows=1)
    list(looks.steps(3))
    rows = [one for one in looks.scheduler.requests.values() if one is not live]
    looks.engine.abort(rows)
    list(looks.steps(40))  # vLLM's own iterations
    looks.engine.add(40, 10, offline=True)
    context = live.num_computed_tokens
    next(looks.steps(1))
    assert looks.scheduler.last_iteration.batch == Batch.of([Slice(1, context, True)])


def test_a_finished_request_is_not_kept(make: Callable[..., Looks]) -> None:
    looks = make()
    live = looks.beside_rows(tokens=12)
    while not live.is_finished():
        next(looks.steps(1))
    assert not looks.scheduler._repetition._requests


def test_turns_of_rows_go_on(make: Callable[..., Looks], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows cannot leave alone, their iterations alternate with those of live requests."""
    from conserve.engine.policy.view import Slo

    looks = make()
    live = looks.beside_rows(tokens=100)
    monkeypatch.setattr(type(looks.scheduler), "_slo", Slo(ttft_ms=700, tbt_ms=400))
    arrivals = looks.scheduler.arrival_monitor
    monkeypatch.setattr(type(arrivals), "acts", True)
    monkeypatch.setattr(arrivals, "separable", False)
    turns = [live.request_id not in names for names in looks.steps(20)]
    assert turns == 10 * [True, False] or turns == 10 * [False, True]
