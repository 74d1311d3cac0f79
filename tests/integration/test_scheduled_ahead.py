"""Iterations scheduled ahead: planned with the tokens that there are, refused, settled, and never for long."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from conserve.engine.runtime.safepoint import ALL_ROWS
from conserve.engine.runtime.stopwatch import DeviceTime
from tests.few_slots import keep_no_slot, parked_under_way
from tests.warned import OF_VLLM

pytestmark = [
    pytest.mark.engine,
    *OF_VLLM,
]

SHARED = [[n * 50 + i for i in range(64)] for n in range(3)]  # of prompts that share KV blocks


def storm(
    engine: Any, seed: int, steps: int, *, losing: float = 0.0, decorate: Callable[[Any], None] | None = None
) -> list[Any]:
    """Requests of either lane, in turn with times of offline ones alone; returns them all, answered."""
    dice, asked = Random(seed), list[Any]()
    for n in range(steps):
        if len(engine.scheduler.requests) < 12 and dice.random() < 0.3:
            length, most = int(10 ** dice.uniform(0, 2.6)), dice.randint(1, 20)
            own = [dice.randrange(900) for _ in range(length)]
            prompt = dice.choice(SHARED) + own if dice.random() < 0.3 else length
            asked.append(engine.request(prompt, most, offline=n % 400 < 200 or dice.random() < 0.7))
            if decorate is not None:
                decorate(asked[-1])
            engine.scheduler.add_request(asked[-1])
        step_losing(engine, dice, losing)
    end(engine)
    return asked


def step_losing(engine: Any, dice: Random, losing: float) -> None:
    """One step, before which a request may lose its memory, or be aborted."""
    if engine.scheduler.running and dice.random() < losing:
        engine.evict(dice.choice(engine.scheduler.running))
    if engine.scheduler.requests and dice.random() < losing / 5:
        engine.abort([dice.choice(list(engine.scheduler.requests.values()))])
    engine.step()


def end(engine: Any) -> None:
    """Step until nothing is left to do; `assert_settled` says whether all is done."""
    for _ in range(20_000):
        if not engine.busy:
            break
        engine.step()


def assert_settled(engine: Any, asked: list[Any]) -> None:
    scheduler = engine.scheduler
    for request in asked:
        aborted = request.get_finished_reason().name == "ABORT"
        assert engine.tokens[request.request_id] == request.max_tokens or aborted
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is vLLM's own
    assert not scheduler.requests
    assert not scheduler.running
    assert not scheduler.ahead._in_flight
    assert not scheduler.arrival_monitor._in_flight


def planned(engine: Any) -> Any:
    """The next iteration, on its way to the worker."""
    from conserve.engine.vllm.iteration import iteration_of

    output = engine.scheduler.schedule()
    return output, iteration_of(output)


class TestStorms:
    """The worker asserts that each iteration is planned with the tokens that it has (`scheduled_ahead`)."""

    @pytest.mark.parametrize("separable", [True, False])
    @pytest.mark.parametrize("always", [True, False])
    def test_each_token_is_computed_once(
        self, separable: bool, always: bool, tmp_path: Path, clock: Any
    ) -> None:
        from tests.scheduled_ahead import ScheduledAhead, beside_online_requests

        engine = ScheduledAhead(tmp_path, clock, blocks=4096, seed=1, separable=separable)
        with beside_online_requests() if always else nullcontext():
            asked = storm(engine, 1, 300)
        assert_settled(engine, asked)
        report = engine.scheduler.arrival_monitor.report()
        assert engine.most_in_flight == 2
        assert min(engine.scheduler.ahead.count, report["iterations_left"], report["refused"]) > 10
        assert report["live_tokens_recomputed"] == engine.live_again == 0
        assert engine.scheduler.traffic.offline_tokens == engine.offline_computed

    @pytest.mark.parametrize("always", [True, False])
    def test_rows_that_are_evicted_or_aborted_in_flight(
        self, always: bool, tmp_path: Path, clock: Any
    ) -> None:
        from tests.scheduled_ahead import ScheduledAhead, beside_online_requests

        engine = ScheduledAhead(tmp_path, clock, blocks=40, seed=2)
        with beside_online_requests() if always else nullcontext():
            asked = storm(engine, 2, 500, losing=0.1)
        assert_settled(engine, asked)
        assert sum(request.num_preemptions for request in asked) > 10

    @pytest.mark.parametrize("always", [True, False])
    def test_an_image_of_a_refused_iteration_is_encoded_by_a_later_one(
        self, always: bool, tmp_path: Path, clock: Any
    ) -> None:
        """Rows share images, lose memory and are aborted, and the encoder cache holds a third of the images."""
        from tests.bare_scheduler import let_see, show
        from tests.scheduled_ahead import ScheduledAhead, beside_online_requests

        engine, dice, size = (
            ScheduledAhead(tmp_path, clock, blocks=400, seed=3, separable=False),
            Random(3),
            40,
        )

        def images(request: Any) -> None:
            places = range(dice.randint(0, 60), request.num_prompt_tokens - size, 2 * size)
            show(request, {place: f"image-{dice.randrange(9)}" for place in places}, size)

        let_see(engine, 3 * size)
        with beside_online_requests() if always else nullcontext():
            asked = storm(engine, 3, 500, losing=0.1, decorate=images)
        assert_settled(engine, asked)
        report, cache = engine.scheduler.arrival_monitor.report(), engine.scheduler.encoder_cache_manager
        assert min(engine.scheduler.ahead.count, report["refused"]) > 10
        assert cache.num_freeable_slots == cache.cache_size, "every image is free to go"
        assert cache.num_free_slots == cache.cache_size - size * len(cache.cached)

    @pytest.mark.full
    @pytest.mark.parametrize("separable", [True, False])
    @pytest.mark.parametrize("blocks", [40, 4096])
    @pytest.mark.parametrize("seed", range(5))
    def test_long_storms(self, seed: int, blocks: int, separable: bool, tmp_path: Path, clock: Any) -> None:
        from tests.scheduled_ahead import ScheduledAhead, beside_online_requests

        engine = ScheduledAhead(tmp_path, clock, blocks=blocks, seed=seed, separable=separable)
        with beside_online_requests() if seed % 2 else nullcontext():
            asked = storm(engine, seed, 8000, losing=0.1 * (blocks == 40))
        assert_settled(engine, asked)
        assert engine.scheduler.arrival_monitor.report()["refused"] > 500


class TestOnlineRequests:
    """While an online request is about, no iteration is scheduled before the one ahead of it is settled."""

    @pytest.fixture
    def engine(self, tmp_path: Path, clock: Any) -> Any:
        """Offline rows in the engine, whose worker has told what it can do."""
        from tests.scheduled_ahead import ScheduledAhead

        engine = ScheduledAhead(tmp_path, clock, blocks=4096, seed=0, often=0.0, refuses=False)
        for _ in range(4):
            engine.add(900, 40, offline=True)
        for _ in range(3):
            engine.step()
        return engine

    def test_with_offline_requests_alone_one_iteration_waits_while_another_runs(self, engine: Any) -> None:
        while engine.queued:
            engine.take_in()
        assert engine.scheduler.has_requests()
        (_, first), (_, second) = planned(engine), planned(engine)
        assert [first.ahead, second.ahead] == [False, True]
        assert second.stamp.ahead
        assert second.stamp.settled == first.stamp.iteration - 1

    def test_an_arrival_refuses_the_iteration_that_waits(self, engine: Any) -> None:
        while engine.queued:
            engine.take_in()
        (output, first), (waiting, second) = planned(engine), planned(engine)
        flag = engine.scheduler.arrival_monitor._flag
        request = engine.request(50, 4)
        engine.scheduler.arriving(request)
        assert flag.rows_asked(first.stamp.iteration) == ALL_ROWS, "the arrival would wait for 256 tokens"
        assert flag.is_refused(second.stamp.iteration)
        assert not engine.scheduler.has_requests(), "the next is planned with the arrival, behind these"
        engine.run(output, left=frozenset(output.num_scheduled_tokens))
        engine.take_in()
        assert not engine.scheduler.has_requests()
        engine.run(waiting, refused=True)
        engine.take_in()
        engine.scheduler.add_request(request)
        assert engine.scheduler.has_requests()
        output, third = planned(engine)
        assert request.request_id in output.num_scheduled_tokens
        assert not third.ahead
        report = engine.scheduler.arrival_monitor.report()
        assert [report["iterations_left"], report["refused"]] == [1, 1]
        engine.run(output)
        assert not engine.scheduler.has_requests()
        while engine.busy or engine.queued:
            engine.step()
        assert engine.tokens[request.request_id] == 4

    def test_an_iteration_that_has_started_is_left_and_not_refused(self, engine: Any) -> None:
        """An iteration's start is the worker's word: the scheduler reads the results of the one before it later."""
        while engine.queued:
            engine.take_in()
        (_, first), (_, second) = planned(engine), planned(engine)
        flag = engine.scheduler.arrival_monitor._flag
        flag.note_start(second.stamp.iteration, engine.clock.monotonic())
        engine.scheduler.arriving(engine.request(50, 4))
        assert not flag.is_refused(second.stamp.iteration)
        assert flag.rows_asked(second.stamp.iteration) == ALL_ROWS
        assert not flag.rows_asked(first.stamp.iteration), "it has ended"

    def test_an_arrival_while_the_iteration_is_planned_refuses_it(
        self, engine: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        while engine.queued:
            engine.take_in()
        planned(engine)
        plan = engine.scheduler._plan
        request = engine.request(50, 4)
        monkeypatch.setattr(
            engine.scheduler, "_plan", lambda: (plan(), engine.scheduler.arriving(request))[0]
        )
        _, second = planned(engine)
        assert engine.scheduler.arrival_monitor._flag.is_refused(second.stamp.iteration)

    @pytest.mark.parametrize("dropped", [True, False])
    def test_where_all_requests_are_aborted_the_next_waits_for_none_in_flight(
        self, engine: Any, dropped: bool
    ) -> None:
        """Behind a fault (--enable-fault-tolerance) vLLM drops what is in flight; where it pauses, results come."""
        from vllm.v1.request import RequestStatus

        while engine.queued:
            engine.take_in()
        for _ in range(2):
            output, _ = planned(engine)
            if not dropped:
                engine.run(output)
        engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        while engine.queued:
            engine.take_in()
        live = engine.add(50, 4)
        assert engine.scheduler.has_requests()
        end(engine)
        assert_settled(engine, [live])

    def test_an_arrival_that_vllm_refuses_is_soon_forgotten(self, engine: Any) -> None:
        """It refuses all while it drains, and the rows in flight are to end then."""
        while engine.queued:
            engine.take_in()
        monitor = engine.scheduler.arrival_monitor
        monitor.arriving(engine.request(50, 4), 1.0, arrived=engine.clock.monotonic())
        asked = []
        for _ in range(6):
            output, iteration = planned(engine)
            asked.append(monitor._flag.rows_asked(iteration.stamp.iteration))
            engine.run(output)
            engine.take_in()
        assert asked == [ALL_ROWS] * 3 + [0] * 3
        assert not monitor.expects

    def test_rows_leave_by_what_they_have_left_of_the_iteration_alone(self, engine: Any) -> None:
        """Tokens of the iteration behind it are none of a row's context."""
        from conserve.engine.vllm.preemption.arrivals import slice_of

        while engine.queued:
            engine.take_in()
        (_, first), (_, second) = planned(engine), planned(engine)
        both = [(row, tokens) for row, tokens in first.rows if row.request_id in second.tokens]
        assert both
        for row, tokens in both:
            context = row.num_computed_tokens - second.tokens[row.request_id] - tokens
            assert slice_of(row, tokens, [second]).context == context

    def test_a_latency_model_learns_by_the_devices_clock_from_iterations_that_overlap(
        self, engine: Any
    ) -> None:
        while engine.queued:
            engine.take_in()
        (_, first), (_, second) = planned(engine), planned(engine)
        first.device = second.device = DeviceTime(own_ms=70.0, since_last_ms=80.0)
        assert first.batch_ms is None, "the host's work before it is in that time"
        assert second.batch_ms == 80.0
        second.device = None
        assert second.batch_ms is None

    def test_the_next_iteration_runs_since_the_devices_end_of_the_one_before(
        self, engine: Any, clock: Any
    ) -> None:
        """The host reads the outcome 30 ms later, behind a launch."""
        while engine.queued:
            engine.take_in()
        (_, first), (_, second), (_, third) = planned(engine), planned(engine), planned(engine)
        ahead, now = engine.scheduler.ahead, clock.monotonic()
        ahead.settled(first, now)
        assert second.started == now, "no clock but the host's tells when the first one began"
        second.device = DeviceTime(own_ms=4.0, since_last_ms=5.0)
        ahead.settled(second, now + 0.035)
        assert third.started == now + 0.005


class TestBesideOnlineRequests:
    """Iterations of online requests that want short ones are scheduled ahead, and no row leaves these."""

    SHORT_MS, LONG_MS = 100.0, 1000.0  # the smallest iteration takes 15 ms

    @pytest.fixture
    def engine(self, tmp_path: Path, clock: Any) -> Any:
        """Offline rows and an online request that decodes, in an engine whose worker has told what it can do."""
        from tests.scheduled_ahead import ScheduledAhead

        engine = ScheduledAhead(
            tmp_path, clock, blocks=4096, seed=0, often=0.0, refuses=False, tbt_ms=self.SHORT_MS
        )
        for _ in range(4):
            engine.add(900, 40, offline=True)
        for _ in range(3):
            engine.step()
        while engine.queued:
            engine.take_in()
        return engine

    def test_one_waits_while_another_runs_and_neither_can_be_left(self, engine: Any) -> None:
        live = engine.add(50, 6)
        assert engine.scheduler.has_requests()
        for _ in range(4):
            output, iteration = planned(engine)
            assert live.request_id in output.num_scheduled_tokens
            assert len(output.num_scheduled_tokens) > 1, "rows are in it"
            assert (iteration.stamp, iteration.registers_late, iteration.overlapped) == (None, False, False)
            assert engine.scheduler.has_requests(), "the next one does not wait"
            engine.run(output)
            if engine.queued == 2:
                engine.take_in()
        assert iteration.follows
        assert not iteration.cold

    def test_the_first_one_waits_for_iterations_that_rows_may_leave(self, engine: Any) -> None:
        output, offline = planned(engine)
        assert offline.stamp is not None
        engine.run(output)
        engine.add(50, 6)
        assert not engine.scheduler.has_requests()
        engine.take_in()
        assert engine.scheduler.has_requests()
        _, beside = planned(engine)
        assert beside.stamp is None
        assert beside.cold

    def test_a_prompt_is_as_old_as_it_will_be_when_the_iteration_before_it_is_over(self, engine: Any) -> None:
        from conserve.engine.vllm.scheduling.observation import Picture

        def age_ms() -> float:
            picture = Picture(engine.scheduler, engine.scheduler.traffic, surcharge_ms=0.0)
            view = picture.view(engine.scheduler.slo, engine.scheduler.iterations.model)
            return next(iter(view.waiting_online)).age_ms

        engine.add(50, 6)
        _, running = planned(engine)
        engine.add(50, 6)
        assert age_ms() == pytest.approx(running.plan.predicted_ms)
        engine.clock.now += running.plan.predicted_ms / 2e3
        assert age_ms() == pytest.approx(running.plan.predicted_ms)
        engine.clock.now += running.plan.predicted_ms / 1e3
        assert age_ms() == pytest.approx(1.5 * running.plan.predicted_ms)

    def test_iterations_that_no_row_leaves_are_counted_as_ahead_too(self, engine: Any) -> None:
        engine.add(50, 6)
        before = engine.scheduler.ahead.count
        for _ in range(2):
            planned(engine)
        assert engine.scheduler.ahead.count == before + 1

    def test_an_iteration_runs_from_the_end_of_the_one_before_it(self, engine: Any) -> None:
        engine.add(50, 6)
        output, first = planned(engine)
        engine.run(output)
        output, second = planned(engine)
        engine.run(output)
        assert second.started == first.started
        engine.clock.now += 0.03
        engine.take_in()
        assert second.started - first.started == pytest.approx(0.03)

    def test_behind_an_iteration_of_nothing_the_device_was_idle(self, engine: Any) -> None:
        from conserve.engine.vllm.iteration import Iteration

        ahead = engine.scheduler.ahead
        nothing, next_one = Iteration(), Iteration(tokens={"on": 1})
        ahead.scheduled(nothing)
        ahead.scheduled(next_one)
        assert (next_one.follows, next_one.cold) == (False, True)
        ahead.settled(nothing, 0.0)
        ahead.settled(next_one, 0.0)

    def test_a_request_on_its_way_ends_the_rows_time_alone(self, engine: Any) -> None:
        assert not engine.scheduler.ahead._beside_online
        engine.scheduler.arriving(engine.request(50, 4))
        assert engine.scheduler.ahead._beside_online

    def test_a_request_that_waits_for_its_grammar_keeps_rows_from_nothing(
        self, engine: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        live = engine.add(50, 6)
        status = live.status
        monkeypatch.setattr(
            engine.scheduler, "_is_blocked_waiting_status", lambda one: one is status, raising=True
        )
        assert not engine.scheduler.ahead._beside_online
        monkeypatch.undo()
        assert engine.scheduler.ahead._beside_online

    def test_where_they_bear_long_ones_rows_may_leave_and_the_next_one_waits(self, engine: Any) -> None:
        engine.scheduler.conserve({"slo": {"ttft_ms": 1500, "tbt_ms": self.LONG_MS}})
        engine.add(50, 6)
        output, iteration = planned(engine)
        assert iteration.stamp is not None
        assert not engine.scheduler.has_requests()
        engine.run(output)
        engine.take_in()
        assert engine.scheduler.has_requests()

    def test_in_a_pause_of_rows_the_next_one_overlaps_as_in_an_engine_without_them(self, engine: Any) -> None:
        """The receipt would understate the harm if live requests of a pause waited for the host."""
        engine.scheduler.conserve({"slo": {"ttft_ms": 1500, "tbt_ms": self.LONG_MS}})
        pausing = engine.scheduler.traffic._default.accountant.ttft.pausing
        pausing._since = engine.clock.now
        pausing._account._credit = -1.0
        engine.add(50, 6)
        for _ in range(2):
            output, iteration = planned(engine)
            engine.run(output)
            engine.take_in()
        output, iteration = planned(engine)
        assert iteration.stamp is None
        assert not engine.scheduler.offline & iteration.tokens.keys()
        assert engine.scheduler.has_requests()
        engine.run(output)
        engine.take_in()
        pausing._since = None
        for _ in range(3):
            output, iteration = planned(engine)
            engine.run(output)
            engine.take_in()
        assert engine.scheduler.offline & iteration.tokens.keys()
        assert iteration.stamp is not None, "rows may leave again"

    def test_harm_wants_short_ones(self, engine: Any) -> None:
        engine.scheduler.conserve({"slo": {"ttft_ms": None, "tbt_ms": None, "harm": 0.1}})
        engine.add(50, 6)
        assert planned(engine)[1].stamp is None
        assert engine.scheduler.has_requests()

    def test_without_preemption_an_arrival_is_known_to_wait_for_two_iterations(self, engine: Any) -> None:
        from conserve.engine.vllm.scheduling.observation import Picture

        engine.scheduler.conserve({"preemption": "off"})
        engine.add(50, 6)
        _, iteration = planned(engine)
        assert iteration.stamp is None
        picture = Picture(engine.scheduler, engine.scheduler.traffic, surcharge_ms=0.0)
        view = picture.view(engine.scheduler.slo, engine.scheduler.iterations.model)
        assert view.ahead
        assert not view.rows_leave

    def test_where_nothing_is_scheduled_ahead_rows_may_leave_at_once(self, engine: Any) -> None:
        engine.scheduler.ahead._asynchronous = False
        engine.add(50, 6)
        _, iteration = planned(engine)
        assert iteration.stamp is not None
        assert not iteration.cold

    @pytest.mark.parametrize(("blocks", "losing"), [(4096, 0.0), (40, 0.1)])
    @pytest.mark.parametrize("separable", [True, False])
    def test_each_token_is_computed_once(
        self, separable: bool, blocks: int, losing: float, tmp_path: Path, clock: Any
    ) -> None:
        from tests.scheduled_ahead import ScheduledAhead

        engine = ScheduledAhead(
            tmp_path, clock, blocks=blocks, seed=1, separable=separable, tbt_ms=self.SHORT_MS
        )
        overlapping, scheduled = 0, engine.scheduler.ahead.scheduled

        def counting(iteration: Any) -> None:
            nonlocal overlapping
            scheduled(iteration)
            online = any(name.startswith("on") for name in iteration.tokens)
            overlapping += iteration.follows and online and len(iteration.tokens) > 1

        engine.scheduler.ahead.scheduled = counting
        asked = storm(engine, 1, 300, losing=losing)
        assert_settled(engine, asked)
        report = engine.scheduler.arrival_monitor.report()
        assert overlapping > 20
        assert min(engine.scheduler.ahead.count, report["iterations_left"]) > 10
        assert report["live_tokens_recomputed"] == engine.live_again == 0
        if not losing:
            assert engine.scheduler.traffic.offline_tokens == engine.offline_computed


class TestFewSlots:
    """Live requests come in bursts and find a row in each slot, some with a token under way."""

    @staticmethod
    def bursts(engine: Any, seed: int, steps: int, *, losing: float = 0.0) -> list[Any]:
        dice, asked, scheduler = Random(seed), list[Any](), engine.scheduler
        slots = scheduler.max_num_running_reqs

        def ask(length: int, most: int, *, offline: bool) -> None:
            asked.append(engine.request(length, most, offline=offline))
            scheduler.add_request(asked[-1])

        for _ in range(steps):
            while len(scheduler.offline) < slots + 2:
                ask(int(10 ** dice.uniform(0, 2.6)), dice.randint(1, 60), offline=True)
            live = len(scheduler.requests) - len(scheduler.offline)
            if dice.random() < 0.08 and live < 2 * slots:
                for _ in range(dice.randint(1, slots)):
                    ask(int(10 ** dice.uniform(0, 2)), dice.randint(1, 12), offline=False)
            step_losing(engine, dice, losing)
        end(engine)
        return asked

    @pytest.mark.parametrize(("blocks", "losing"), [(4096, 0.0), (60, 0.05)])
    @pytest.mark.parametrize("seed", range(2))
    def test_rows_go_on_where_they_were(
        self,
        seed: int,
        blocks: int,
        losing: float,
        tmp_path: Path,
        clock: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from tests.scheduled_ahead import ScheduledAhead

        engine = ScheduledAhead(tmp_path, clock, blocks=blocks, seed=seed, slots=4, tbt_ms=12.0)
        scheduler, under_way = engine.scheduler, parked_under_way(monkeypatch)
        keep_no_slot(scheduler, monkeypatch)
        asked = self.bursts(engine, seed, 900, losing=losing)
        assert_settled(engine, asked)
        assert scheduler.parking.count > 30
        assert len(under_way) > 2
        if not losing:
            assert scheduler.traffic.offline_tokens == engine.offline_computed, "no token is computed twice"


class TestBesideCheckpoints:
    """The connector of checkpoints takes KV from no other engine, so what is freed is free at once."""

    @staticmethod
    def engine(folder: Path, clock: Any, **settings: Any) -> Any:
        from conserve.engine.vllm.simulation.copies import HostCopies, checkpointing
        from tests.scheduled_ahead import BLOCK, ScheduledAhead

        connector = checkpointing(HostCopies(blocks=500, block_ms=1.0), BLOCK)
        settings = {"seed": 0, "often": 0.0, "refuses": False, "kv_transfer_config": connector, **settings}
        engine = ScheduledAhead(folder, clock, **settings)
        engine.scheduler.checkpoints.on = False  # its worker copies nothing
        return engine

    def test_another_role_in_a_users_own_flags_is_warned_of(
        self, tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm.config import KVTransferConfig

        from conserve.engine.vllm.checkpoint import connector

        said: list[str] = []
        log = SimpleNamespace(warning=lambda text, *values: said.append(text % values))
        monkeypatch.setattr(connector, "log", log)
        ours = {"kv_connector": "CheckpointConnector", "kv_connector_module_path": "conserve.vllm"}
        self.engine(tmp_path, clock, blocks=64)
        assert said == []
        self.engine(
            tmp_path, clock, blocks=64, kv_transfer_config=KVTransferConfig(**ours, kv_role="kv_both")
        )
        assert ['write "kv_role": "kv_producer"' in line for line in said] == [True]

    def test_the_cache_is_reset_while_an_iteration_is_in_flight(self, tmp_path: Path, clock: Any) -> None:
        engine = self.engine(tmp_path, clock, blocks=4096)
        rows = [engine.add(900, 40, offline=True) for _ in range(4)]
        for _ in range(9):
            engine.step()
        assert engine.queued == 1
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        end(engine)
        assert_settled(engine, rows)

    def test_an_arrival_takes_the_memory_of_the_row_that_is_evicted_for_it(
        self, tmp_path: Path, clock: Any
    ) -> None:
        engine = self.engine(tmp_path, clock, blocks=60, tbt_ms=100.0)
        asked = [engine.add(150, 90, offline=True) for _ in range(4)]
        asked.append(engine.add(20, 60))
        for _ in range(20):
            engine.step()
        asked.append(arrival := engine.add(400, 4))
        output, iteration = planned(engine)
        assert iteration.follows, "another one is in flight"
        assert iteration.plan.evicted
        assert arrival.request_id in output.num_scheduled_tokens
        engine.run(output)
        end(engine)
        assert_settled(engine, asked)


def test_rows_wait_for_a_prefix_that_an_iteration_in_flight_computes(tmp_path: Path, clock: Any) -> None:
    """A prefix is registered when its iteration is settled, and the next one is planned before that."""
    from tests.scheduled_ahead import BLOCK, ScheduledAhead

    engine = ScheduledAhead(tmp_path, clock, blocks=4096, seed=0, often=0.0, refuses=False)
    engine.add(20, 1, offline=True)
    while engine.busy:
        engine.step()  # the worker has told what it can do
    prefixes = [[n * 31 + i for i in range(10 * BLOCK)] for n in range(6)]
    tails = [[900 + row, *range(BLOCK)] for row in range(8)]
    before = engine.offline_computed
    for prefix in prefixes:
        for tail in tails:
            engine.add(prefix + tail, 1, offline=True)
    while engine.busy:
        engine.step()
    least, own = sum(map(len, prefixes)), sum(map(len, tails)) * len(prefixes)
    computed = engine.offline_computed - before - own
    assert engine.most_in_flight == 2
    assert least <= computed <= 1.5 * least


class TestTheServersDefault:
    """vLLM's own choice, unless rows could leave but for it."""

    @staticmethod
    def config(v2: bool, ahead: bool, pipeline: int) -> Any:
        return SimpleNamespace(
            use_v2_model_runner=v2,
            scheduler_config=SimpleNamespace(async_scheduling=ahead),
            kv_transfer_config=None,
            ec_transfer_config=None,
            speculative_config=None,
            parallel_config=SimpleNamespace(
                worker_cls="auto", pipeline_parallel_size=pipeline, data_parallel_size=1
            ),
            model_config=SimpleNamespace(
                is_hybrid=False, is_attention_free=False, is_encoder_decoder=False, runner_type="generate"
            ),
        )

    @pytest.mark.parametrize(
        ("v2", "pipeline", "flags", "preemption", "ahead"),
        [
            (True, 1, [], "prompt", True),
            (False, 1, [], "prompt", False),
            (False, 1, ["--async-scheduling"], "prompt", True),
            (False, 1, [], "off", True),
            (False, 2, [], "prompt", True),  # rows could not leave anyway
        ],
    )
    def test_it_is_switched_off_under_the_v1_runner_alone(
        self,
        v2: bool,
        pipeline: int,
        flags: list[str],
        preemption: str,
        ahead: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from conserve.engine.section import EngineSection
        from conserve.engine.vllm.server.process import engine_config

        def made(args: Any) -> Any:
            wanted = args.async_scheduling is not False
            return SimpleNamespace(create_engine_config=lambda _: self.config(v2, wanted, pipeline))

        monkeypatch.setattr("vllm.engine.arg_utils.AsyncEngineArgs.from_cli_args", made)
        monkeypatch.setattr("conserve.engine.vllm.launching.flags.reserve_cores", lambda config: None)
        args: Any = SimpleNamespace(async_scheduling=None)
        config = engine_config(args, flags, EngineSection(preemption=preemption))
        assert config.scheduler_config.async_scheduling is ahead


class TestAStep:
    """vLLM's engine core, whose step ends with its iteration where the next one waits for that."""

    @staticmethod
    def core(waits: bool | None) -> Any:
        """A core that schedules in one step and reads the results in the next."""
        steps = iter([(None, True), ({0: "results"}, False)])
        ahead = SimpleNamespace(waits=lambda: waits)
        scheduler = SimpleNamespace() if waits is None else SimpleNamespace(ahead=ahead)
        return SimpleNamespace(scheduler=scheduler, step=lambda: next(steps))

    @pytest.mark.parametrize(("waits", "outputs"), [(True, {0: "results"}), (False, None), (None, None)])
    def test_it_waits_where_the_scheduler_does(self, waits: bool | None, outputs: Any) -> None:
        from conserve.engine.vllm.server.plugin import waiting

        step = waiting(lambda core: core.step())
        assert step(self.core(waits)) == (outputs, True)

    @pytest.mark.parametrize("online", [True, False])
    def test_it_asks_our_scheduler(self, online: bool, tmp_path: Path, clock: Any) -> None:
        from conserve.engine.vllm.server.plugin import waiting
        from tests.scheduled_ahead import ScheduledAhead

        engine = ScheduledAhead(tmp_path, clock, blocks=4096, seed=0, often=0.0, refuses=False)
        engine.add(900, 40, offline=True)
        for _ in range(3):
            engine.step()
        while engine.queued:
            engine.take_in()
        if online:
            engine.add(50, 4)

        def step(core: Any) -> tuple[Any, bool]:
            before = engine.queued
            engine.step()
            return (None, True) if engine.queued > before else ({}, False)

        assert waiting(step)(engine) == (({}, True) if online else (None, True))

    def test_the_engine_core_steps_that_way(self) -> None:
        from vllm.v1.engine.core import EngineCore

        from conserve.engine.vllm.server.plugin import hook_engine_core

        hook_engine_core()
        step = EngineCore.step_with_batch_queue
        assert step.__wrapped__.__name__ == "step_with_batch_queue"
        hook_engine_core()
        assert EngineCore.step_with_batch_queue is step, "hooked once"
