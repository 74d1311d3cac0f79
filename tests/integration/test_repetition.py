"""Plans that are repeated while requests decode: rows alone, live requests beside rows with time or without."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conserve.names import PROMPT
from tests.warned import OF_VLLM

pytestmark = [pytest.mark.engine, *OF_VLLM]
BLOCK = 16  # tokens
HARMLESS = {"harm": 1e-4}  # no row finds time beside a live request
ROOMY = {"harm": 0.5}  # some rows do


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

    def run_rows(self, count: int, steps: int = 5) -> list[Any]:
        """Add rows, and run so many iterations."""
        rows = [self.engine.add(40, 200, offline=True) for _ in range(count)]
        list(self.steps(steps))
        return rows

    def beside_rows(self, rows: int = 3, tokens: int = 400) -> Any:
        """A live request that decodes while rows wait for it."""
        self.run_rows(rows, steps=3)
        live = self.engine.add(40, tokens)
        self.engine.step()
        return live


@pytest.fixture
def make(tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Looks]:
    from conserve.engine.vllm.settings import WORKER
    from tests.bare_scheduler import BareEngine, engine_config

    def make(
        policy: str = "conserve", *, blocks: int = 4096, asynchronous: bool = False, **section: Any
    ) -> Looks:
        config = engine_config(tmp_path, section={"policy": policy, **HARMLESS, **section}, block_size=BLOCK)
        config.scheduler_config.async_scheduling = asynchronous
        if "preemption" in section:
            config.parallel_config.worker_cls = WORKER
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
            looks.scheduler.iterations.model.predict(batch), rel=0.05
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
    monkeypatch.setattr(type(looks.scheduler), "slo", Slo(harm=0.9))
    assert [len(names) for names in looks.steps(2)] == [1, 4], "the first was planned while the last one ran"


def test_rows_give_up_their_memory_before_live_requests_lack_it(make: Callable[..., Looks]) -> None:
    looks = make(blocks=24)
    live = looks.beside_rows(rows=4, tokens=250)
    while not live.is_finished():
        next(looks.steps(1))
    assert not live.num_preemptions


def rows_of(looks: Looks, names: set[str]) -> set[str]:
    return names & looks.scheduler.offline


def test_rows_alone_are_looked_at_once_in_nine_iterations(make: Callable[..., Looks]) -> None:
    looks = make()
    looks.run_rows(5)
    looks.number = 0
    assert all(len(names) == 5 for names in looks.steps(90))
    assert looks.number == 10


def test_rows_that_find_time_beside_a_live_request_are_repeated(make: Callable[..., Looks]) -> None:
    looks = make(**ROOMY)
    live = looks.beside_rows(rows=60)
    list(looks.steps(20))
    looks.number = 0
    for names in looks.steps(60):
        last = looks.scheduler.last_iteration
        assert live.request_id in names
        assert 0 < len(rows_of(looks, names)) < 60
        assert last.plan.predicted_ms <= last.limit_ms
    assert looks.number <= 12


def test_time_that_grows_short_is_seen(make: Callable[..., Looks]) -> None:
    """Contexts of rows grow by a token a step: the limit of their plan is kept all the same."""
    from conserve.profiles.batch import Batch, Slice

    looks = make()
    looks.run_rows(8)
    repetition, scheduler = looks.scheduler.repetition, looks.scheduler
    next(names for names in looks.steps(9) if repetition._left == 8)  # planned from a look just now
    plan = repetition._plan
    requests = [scheduler.requests[name] for name in plan.tokens]
    after = Batch.of(Slice(1, one.num_computed_tokens, True) for one in requests)
    enough_ms = scheduler.iterations.model.predict(after) * (1 + 1e-6)
    object.__setattr__(plan, "limit_ms", enough_ms)  # for one more iteration, and not for two
    repetition.prepare()
    looks.number = 0
    list(looks.steps(1))
    assert looks.number == 0
    list(looks.steps(1))
    assert looks.number == 1


def test_rows_are_looked_at_where_they_would_take_what_arrivals_want(make: Callable[..., Looks]) -> None:
    looks = make()
    looks.run_rows(8)
    repetition, pool = looks.scheduler.repetition, looks.scheduler.kv_cache_manager.block_pool
    next(names for names in looks.steps(9) if repetition._left > 4)
    for kept, looked in ((8, 0), (0, 1)):  # the eight may take a block each
        repetition._reserved_blocks, looks.number = pool.get_num_free_blocks() - kept, 0
        list(looks.steps(1))
        assert looks.number == looked


def test_a_row_that_arrives_begins_at_once(make: Callable[..., Looks]) -> None:
    looks = make()
    looks.run_rows(1, steps=4)
    row = looks.engine.add(30, 5, offline=True)
    assert row.request_id in next(looks.steps(1))


def test_a_live_request_among_repeated_rows_begins_at_once(make: Callable[..., Looks]) -> None:
    looks = make(**ROOMY)
    looks.run_rows(5)
    live = looks.engine.add(40, 5)
    assert live.request_id in next(looks.steps(1))


def test_a_waiting_row_takes_the_slot_of_one_that_has_ended(make: Callable[..., Looks]) -> None:
    looks = make()
    slots = looks.scheduler.max_num_running_reqs
    rows = [looks.engine.add(8, 30 + number % 7, offline=True) for number in range(slots + 3)]
    waiting = rows[-3:]
    while not any(row.is_finished() for row in rows):
        next(looks.steps(1))
    before = len(looks.scheduler.running)
    names = next(looks.steps(1))
    assert before < slots
    assert names & {row.request_id for row in waiting}


def test_rows_that_left_are_looked_at_again(
    make: Callable[..., Looks], monkeypatch: pytest.MonkeyPatch
) -> None:
    from conserve.engine.vllm.iteration import IterationOutcome, put

    looks = make(preemption=PROMPT)
    rows = [looks.engine.add(40, 200, offline=True) for _ in range(4)]
    gone, result, left = rows[-1].request_id, looks.engine.result, frozenset[str]()

    def with_leavers(scheduled: Any) -> Any:
        made = result(scheduled)
        outcome = IterationOutcome(left=left, layers_run=1, layers=2, separable=True, safepoints=2)
        put(made, outcome)
        return made

    monkeypatch.setattr(looks.engine, "result", with_leavers)
    list(looks.steps(20))
    while looks.scheduler.repetition._left < 5:
        list(looks.steps(1))
    left, looks.number, computed = frozenset({gone}), 0, rows[-1].num_computed_tokens
    list(looks.steps(1))
    assert (looks.number, rows[-1].num_computed_tokens) == (0, computed)
    assert looks.scheduler.last_iteration.left == left
    left = frozenset()
    list(looks.steps(1))
    assert (looks.number, rows[-1].num_computed_tokens) == (1, computed + 1)


def test_policies_see_a_quiet_minute_in_each_repeated_plan(make: Callable[..., Looks]) -> None:
    looks = make()
    looks.run_rows(5)
    for _ in looks.steps(20):
        assert looks.scheduler.traffic.planned_quiet


def test_live_requests_compute_the_same_with_plans_repeated_or_not(
    make: Callable[..., Looks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows may run in other iterations than without repetition, and get as many tokens to a hundredth."""
    import random

    from conserve.engine.vllm.scheduling import repetition

    def play() -> tuple[list[dict[str, int]], int, int]:
        looks, dice = make(**ROOMY), random.Random(7)
        lived: list[dict[str, int]] = []
        tokens = 0
        for _ in range(80):
            looks.engine.add(dice.randrange(10, 90), dice.randrange(20, 200), offline=True)
        for _ in range(600):
            if dice.random() < 0.03:
                looks.engine.add(dice.randrange(10, 300), dice.randrange(5, 40))
            if dice.random() < 0.1:
                looks.engine.add(dice.randrange(10, 90), dice.randrange(20, 200), offline=True)
            offline = set(looks.scheduler.offline)
            scheduled = looks.engine.step().num_scheduled_tokens
            lived.append({name: count for name, count in scheduled.items() if name not in offline})
            tokens += sum(count for name, count in scheduled.items() if name in offline)
        return lived, tokens, looks.number

    lived, tokens, looked = play()
    monkeypatch.setattr(repetition, "MOST", 0)
    lived_then, tokens_then, looked_then = play()
    assert looked < 0.7 * looked_then
    assert lived == lived_then
    assert tokens == pytest.approx(tokens_then, rel=0.01)


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
    looks.scheduler.recordings.close()
    assert looks.number == 10


def test_nothing_is_repeated_where_iterations_are_scheduled_ahead(make: Callable[..., Looks]) -> None:
    looks = make(asynchronous=True)
    looks.beside_rows()
    assert not looks.scheduler.repetition._left


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
    assert not looks.scheduler.repetition._requests


def test_turns_of_rows_go_on(make: Callable[..., Looks], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows cannot leave alone, their iterations alternate with those of live requests."""
    from conserve.engine.policy.view import Slo

    looks = make()
    live = looks.beside_rows(tokens=100)
    monkeypatch.setattr(type(looks.scheduler), "slo", Slo(ttft_ms=700, tbt_ms=400))
    arrivals = looks.scheduler.arrival_monitor
    monkeypatch.setattr(type(arrivals), "may_leave_next", True)
    monkeypatch.setattr(arrivals, "separable", False)
    turns = [live.request_id not in names for names in looks.steps(20)]
    assert turns == 10 * [True, False] or turns == 10 * [False, True]
