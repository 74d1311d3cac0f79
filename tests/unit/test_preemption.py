"""Layer-wise preemption without an engine: rows that leave, the flag for them, and the places that look at it."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from conserve.engine.policy.preemption import (
    LEAVE_RULES,
    PATIENCE,
    WASTE,
    AllOffline,
    Arrivals,
    JustEnough,
    Never,
    Promptly,
    UnderWay,
    remaining_ms,
    spare_tokens,
    thrown_away,
)
from conserve.engine.runtime import safepoint
from conserve.engine.runtime.safepoint import ALL_ROWS, LeaveFlag, check_us
from conserve.names import OFF
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.conserve import ConServeModel

# torch's own while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


class MsPerToken:
    """A latency model that can be computed in one's head."""

    def predict(self, batch: Batch) -> float:
        return 10.0 + batch.tokens if batch.requests else 0.0

    def can_schedule(self, batch: Batch, request: Slice, tbt_ms: float) -> int:
        raise NotImplementedError


MODEL = MsPerToken()


def under_way(
    rows: Sequence[int], *, online: int = 0, elapsed_ms: float = 0.0, separable: bool = True
) -> UnderWay:
    """An iteration with so many tokens of each offline row, and of one online request."""
    slices = [Slice(tokens, 0) for tokens in rows]
    batch = Batch.of([*slices, *([Slice(online, 0)] if online else [])])
    return UnderWay(batch=batch, rows=slices, separable=separable, elapsed_ms=elapsed_ms)


def arrivals(prompt: int, slack_ms: float, *, ttft_ms: float = 1000.0, spare: float = inf) -> Arrivals:
    return Arrivals(prompts=[Slice(prompt, 0)], slack_ms=slack_ms, ttft_ms=ttft_ms, spare_tokens=spare)


class TestAllOffline:
    policy = AllOffline()

    def leaving(self, running: UnderWay, come: Arrivals) -> int:
        return self.policy.leaving(running, come, MODEL)

    def test_all_leave_exactly_if_the_first_token_would_be_late(self) -> None:
        running = under_way([100, 50], online=40)  # 200 ms, then 60 ms for the prompt
        assert self.leaving(running, arrivals(50, 260)) == 0
        assert self.leaving(running, arrivals(50, 259)) == 2

    def test_what_is_done_already_need_not_be_waited_for(self) -> None:
        running = under_way([100, 50], online=40, elapsed_ms=100)
        assert self.leaving(running, arrivals(50, 160)) == 0
        assert self.leaving(running, arrivals(50, 159)) == 2
        overdue = replace(running, elapsed_ms=1e6)
        assert self.leaving(overdue, arrivals(50, 60)) == 0

    def test_an_arrival_that_is_late_anyway_does_not_wait_longer(self) -> None:
        assert self.leaving(under_way([100]), arrivals(50, -5)) == 1

    def test_an_iteration_that_takes_no_time_is_over(self) -> None:
        free = ConServeModel.of(*[0.0] * 8)
        running = under_way([100], separable=False)
        assert remaining_ms(running, free) == 0
        assert thrown_away(running, free) == 100

    def test_an_iteration_that_begins_anew_is_abandoned_however_late(self) -> None:
        running = under_way([100, 50], separable=False, elapsed_ms=150)
        assert self.leaving(running, arrivals(50, 0)) == 2


class TestJustEnough:
    policy = JustEnough()

    def test_row_after_row_leaves_until_the_promise_can_be_kept(self) -> None:
        # 200 ms; with k rows gone that much less, and the prompt with the rows that are left.
        running = under_way([100, 50, 20], online=20)
        needed = [(200 - gone) + (200 - gone + 50) for gone in (0, 100, 150, 170)]
        for rows, ms in enumerate(needed):
            assert self.policy.leaving(running, arrivals(50, ms), MODEL) == rows
            assert self.policy.leaving(running, arrivals(50, ms - 1), MODEL) == min(rows + 1, 3)

    def test_all_leave_if_not_even_that_is_enough(self) -> None:
        assert self.policy.leaving(under_way([100, 50]), arrivals(50, 1), MODEL) == 2

    @pytest.mark.parametrize("slack_ms", [0.0, 100.0, 259.0, 260.0, 1000.0])
    @pytest.mark.parametrize("elapsed_ms", [0.0, 50.0, 150.0])
    def test_where_rows_cannot_leave_alone_all_leave_or_none(
        self, slack_ms: float, elapsed_ms: float
    ) -> None:
        running = under_way([100, 50], online=40, elapsed_ms=elapsed_ms, separable=False)
        come = arrivals(50, slack_ms)
        assert self.policy.leaving(running, come, MODEL) == AllOffline().leaving(running, come, MODEL)


class TestPromptly:
    policy = Promptly()

    def leaving(self, running: UnderWay, come: Arrivals) -> int:
        return self.policy.leaving(running, come, MODEL)

    def test_an_arrival_waits_for_little_without_a_reason(self) -> None:
        running = under_way([90])  # 100 ms
        assert self.leaving(running, arrivals(50, 1e6, ttft_ms=100 / PATIENCE)) == 0
        assert self.leaving(running, arrivals(50, 1e6, ttft_ms=99 / PATIENCE)) == 1
        nearly_done = replace(running, elapsed_ms=99.0)
        assert self.leaving(nearly_done, arrivals(50, 1e6, ttft_ms=51.0)) == 0

    def test_no_promise_is_no_reason(self) -> None:
        assert self.leaving(under_way([90]), arrivals(50, inf, ttft_ms=inf)) == 0

    def test_comfort_may_throw_away_a_budget_and_a_promise_more(self) -> None:
        half = under_way([90], separable=False, elapsed_ms=50)  # 45 tokens' worth
        assert self.leaving(half, arrivals(50, 1e6, spare=45)) == 1
        assert self.leaving(half, arrivals(50, 1e6, spare=44)) == 0
        assert self.leaving(half, arrivals(50, 0, spare=44)) == 1

    def test_rows_that_go_on_where_they_left_leave_an_overdue_iteration(self) -> None:
        overdue = under_way([90], elapsed_ms=100)
        assert self.leaving(overdue, arrivals(50, 1e6)) == 1
        assert self.leaving(replace(overdue, elapsed_ms=99), arrivals(50, 1e6)) == 0
        assert self.leaving(replace(overdue, separable=False), arrivals(50, 1e6)) == 0

    def test_a_first_token_that_is_just_in_time_is_not_late(self) -> None:
        half = under_way([90], separable=False, elapsed_ms=50)  # 50 ms are left, and 60 for the prompt
        assert self.leaving(half, arrivals(50, 110, spare=0)) == 0
        assert self.leaving(half, arrivals(50, 109, spare=0)) == 1

    @pytest.mark.parametrize(("elapsed_ms", "tokens"), [(0, 0), (50, 45), (100, 90), (150, 90)])
    def test_what_leaves_for_good_throws_its_part_of_the_iteration_away(
        self, elapsed_ms: float, tokens: float
    ) -> None:
        running = under_way([60, 30], elapsed_ms=elapsed_ms, separable=False)
        assert thrown_away(running, MODEL) == tokens
        assert thrown_away(replace(running, separable=True), MODEL) == 0

    def test_it_waits_for_a_fiftieth_of_its_promise_and_spends_1_5_percent_of_the_tokens(self) -> None:
        assert self.leaving(under_way([90]), arrivals(50, 1e6, ttft_ms=5000)) == 0
        assert self.leaving(under_way([90]), arrivals(50, 1e6, ttft_ms=4999)) == 1
        assert spare_tokens(1000, 5) == 10

    def test_the_budget_is_a_share_of_all_tokens(self) -> None:
        assert spare_tokens(1000, 0) == WASTE * 1000
        assert spare_tokens(1000, WASTE * 1000 + 5) == pytest.approx(-5)
        assert spare_tokens(inf, 1e9) == inf


def test_policies_go_by_name() -> None:
    assert {*LEAVE_RULES, OFF} == {"prompt", "all-offline", "just-enough", "never", "off"}
    assert Never().leaving(under_way([100]), arrivals(50, -1), MODEL) == 0


class TestFlag:
    def test_it_speaks_of_one_iteration(self) -> None:
        with LeaveFlag.create() as flag:
            assert [flag.rows_asked(n) for n in range(4)] == [0, 0, 0, 0]
            flag.raise_for(2, 7)
            assert [flag.rows_asked(n) for n in range(4)] == [0, 0, 7, 0]
            flag.raise_for(4)
            assert [flag.rows_asked(n) for n in range(5)] == [0, 0, 0, 0, ALL_ROWS]

    def test_the_iteration_that_runs_and_the_one_that_waits_have_orders_of_their_own(self) -> None:
        with LeaveFlag.create() as flag:
            flag.raise_for(6, 3)
            flag.refuse(7)
            assert [flag.rows_asked(n) for n in (5, 6, 7)] == [0, 3, 0]
            assert [flag.is_refused(n) for n in (5, 6, 7)] == [False, False, True]
            flag.raise_for(7, 2)
            assert flag.rows_asked(7) == 2
            assert not flag.is_refused(7)

    def test_an_iteration_has_started_once_a_worker_says_so(self) -> None:
        with LeaveFlag.create() as flag, LeaveFlag.attach(flag.name) as worker:
            for iteration in (1, 2, 3):
                flag.expect(iteration)
                assert flag.started(iteration) is None
                worker.note_start(iteration, 12.5 + iteration)
                assert flag.started(iteration) == 12.5 + iteration
            assert flag.started(2) == 14.5, "the one before may not be settled yet"

    def test_what_is_raised_for_an_iteration_that_has_ended_says_nothing_to_the_next(self) -> None:
        with LeaveFlag.create() as flag:
            for iteration in range(1, 100):
                assert not flag.rows_asked(iteration)
                flag.raise_for(iteration, iteration)
                assert flag.rows_asked(iteration) == iteration

    def test_numbers_stay_within_their_bits(self) -> None:
        with LeaveFlag.create() as flag:
            flag.raise_for(1, 10**9)
            assert flag.rows_asked(1) == ALL_ROWS
            assert flag.rows_asked(2) == 0
            flag.raise_for(1 << 40, 3)
            assert flag.rows_asked(1 << 40) == 3

    def test_a_process_that_is_no_child_reads_it_and_does_not_take_it_along(self) -> None:
        read = (
            "import sys; from conserve.engine.runtime.safepoint import LeaveFlag\n"
            "flag = LeaveFlag.attach(sys.argv[1]); print(flag.rows_asked(5), flag.rows_asked(6))"
        )
        with LeaveFlag.create() as flag:
            flag.raise_for(6, 4)
            command = [sys.executable, "-c", read, flag.name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            assert done.stdout.split() == ["0", "4"]
            with LeaveFlag.attach(flag.name) as other:
                assert other.rows_asked(6) == 4

    def test_it_is_gone_when_its_owner_is(self) -> None:
        flag = LeaveFlag.create()
        with LeaveFlag.attach(flag.name) as other:
            flag.raise_for(1, 2)
            assert other.rows_asked(1) == 2
        assert flag.rows_asked(1) == 2, "a reader removes nothing"
        flag.close()
        flag.close()
        with pytest.raises(OSError):
            LeaveFlag.attach(flag.name)

    def test_the_cost_of_a_look_is_its_share_of_the_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock_s = [5.0, 5.006]
        monkeypatch.setattr(safepoint, "time", SimpleNamespace(perf_counter=lambda: clock_s.pop(0)))
        assert check_us(2000) == pytest.approx(3.0)


class FakeOrders:
    """Says for each layer what the test says."""

    flag_readable = True

    def __init__(self, **rows: int) -> None:
        self.rows = {int(layer.removeprefix("at_")): count for layer, count in rows.items()}
        self.asked: list[int] = []
        self.layer = 0

    def word(self, stamp: Any) -> None:
        """They have to be asked for."""

    def rows_ordered(self, stamp: Any) -> int:
        self.asked.append(self.layer)
        return max((count for layer, count in self.rows.items() if layer <= self.layer), default=0)


def passed(orders: FakeOrders, layers: int = 8, every: int = 1) -> tuple[Any, list[int]]:
    """The safepoints of one iteration, and what each said."""
    from conserve.engine.vllm.iteration import Stamp
    from conserve.engine.vllm.preemption.safepoints import Safepoints

    safepoints = Safepoints(orders, layers)
    safepoints.arm(Stamp(iteration=1, flag="", rows=["a", "b", "c"], every=every))
    said = []
    for orders.layer in range(layers):
        said.append(safepoints.check(orders.layer))
    return safepoints, said


class TestSafepoints:
    def test_orders_are_news_once(self) -> None:
        safepoints, said = passed(FakeOrders(at_2=1))
        assert said == [0, 0, 1, 0, 0, 0, 0, 0]
        assert safepoints.left_before == 2

    def test_and_again_when_there_are_more_of_them(self) -> None:
        safepoints, said = passed(FakeOrders(at_1=1, at_4=3, at_6=ALL_ROWS))
        assert said == [0, 1, 0, 0, 3, 0, ALL_ROWS, 0]
        assert safepoints.left_before == 1

    def test_only_every_nth_layer_looks(self) -> None:
        orders = FakeOrders(at_1=2)
        safepoints, said = passed(orders, every=3)
        assert orders.asked == [0, 3, 6]
        assert said == [0, 0, 0, 2, 0, 0, 0, 0]
        assert safepoints.left_before == 3

    def test_the_flag_is_not_read_where_no_iteration_is_under_way(self) -> None:
        from conserve.engine.vllm.iteration import Stamp

        orders = FakeOrders(at_0=1)
        safepoints, _ = passed(orders)
        safepoints.disarm()
        orders.asked.clear()
        assert safepoints.check(0) == 0
        assert not orders.asked
        safepoints.arm(Stamp(iteration=2, flag="", rows=["a"], every=1))
        assert safepoints.left_before == 0
        assert safepoints.check(0) == 1, "the next iteration does not know of the last"

    def test_an_iteration_is_abandoned_past_anything_that_catches_exceptions(self) -> None:
        from conserve.engine.vllm.preemption.safepoints import Abandoned

        orders = FakeOrders(at_5=1)
        safepoints, _ = passed(orders, layers=5)
        safepoints.abandon_if_asked(4)
        orders.layer = 5
        with pytest.raises(Abandoned):
            safepoints.abandon_if_asked(5)
        assert not issubclass(Abandoned, Exception)

    def test_layers_are_guarded_in_their_order(self) -> None:
        import torch
        from torch import nn

        from conserve.engine.vllm.iteration import Stamp
        from conserve.engine.vllm.preemption.safepoints import Abandoned, Safepoints, between_layers

        run: list[int] = []

        class Layer(nn.Module):  # type: ignore[misc]
            def __init__(self, number: int) -> None:
                super().__init__()
                self.number = number

            def forward(self, hidden: torch.Tensor) -> torch.Tensor:
                run.append(self.number)
                return hidden + 1

        class Counting(FakeOrders):
            def rows_ordered(self, stamp: Any) -> int:
                self.layer = len(run)
                return super().rows_ordered(stamp)

        layers = nn.ModuleList(map(Layer, range(4)))
        safepoints = Safepoints(Counting(at_2=1), 4)
        between_layers(list(layers), safepoints, None)

        def through() -> float:
            hidden = torch.zeros(1)
            for layer in layers:
                hidden = layer(hidden)
            return float(hidden)

        assert through() == 4, "without a stamp the model is as it was"
        run.clear()
        safepoints.arm(Stamp(iteration=1, flag="", rows=["a"], every=1))
        with pytest.raises(Abandoned):
            through()
        assert run == [0, 1]


class TestDecoderLayers:
    def found(self, *lists: Any, count: int = 3) -> Any:
        from torch import nn

        from conserve.engine.vllm.preemption.safepoints import decoder_layers

        model = nn.Module()
        for number, layers in enumerate(lists):
            model.add_module(f"part{number}", layers)
        return decoder_layers(model, count)

    def layers(self, count: int, attention: str = "self_attn") -> Any:
        from torch import nn

        return nn.ModuleList(
            nn.ModuleDict({attention: nn.Identity(), "mlp": nn.Identity()}) for _ in range(count)
        )

    def test_they_are_the_list_of_that_length_whose_members_attend(self) -> None:
        layers = self.layers(3)
        assert self.found(self.layers(2), self.layers(3, "conv"), layers) == list(layers)

    @pytest.mark.parametrize("attention", ["self_attn", "attention", "attn"])
    def test_attention_has_many_names(self, attention: str) -> None:
        assert self.found(self.layers(3, attention)) is not None

    def test_none_are_found_where_there_are_none_or_too_many(self) -> None:
        assert self.found(self.layers(2)) is None
        assert self.found(self.layers(3, "mixer")) is None
        assert self.found(self.layers(3), self.layers(3)) is None

    def test_lists_within_the_layers_are_no_rivals(self) -> None:
        from torch import nn

        layers = self.layers(3)
        layers[0].add_module(
            "experts", nn.ModuleList(nn.ModuleDict({"att": nn.Identity()}) for _ in range(3))
        )
        assert self.found(layers) == list(layers)


@pytest.mark.parametrize(
    ("setting", "shared"),
    [
        ({}, False),
        ({"index_topk": 2048}, False),  # every layer chooses for itself
        ({"index_topk": 2048, "index_topk_freq": 1, "index_topk_pattern": None}, False),
        ({"index_topk": 2048, "index_topk_freq": 4}, True),
        ({"index_topk": 2048, "index_topk_pattern": "FFSS"}, True),
    ],
)
def test_layers_may_attend_to_what_an_earlier_one_chose_for_a_place_in_the_pass(
    setting: dict[str, Any], shared: bool
) -> None:
    from conserve.engine.vllm.preemption.worker import shares_indices

    assert shares_indices(SimpleNamespace(**setting)) is shared
