"""Harm: what an iteration, and an arrival's wait, may be lengthened by. 1 ms a token, 10 ms an iteration."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from conserve.engine.policy.composer import Composer
from conserve.engine.policy.conserve import Conserve, harmless_wait_ms
from conserve.engine.policy.harm import harm_limit_ms
from conserve.engine.policy.preemption import PATIENCE
from conserve.engine.policy.turns import offline_turn_ms
from conserve.engine.policy.view import Candidate, Slo, View, tightest
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.correction import FrozenModel
from conserve.profiles.margin import limit_ms_for, step_of
from tests.policy_views import MS_PER_TOKEN, add_steps, decodes, view_of

HARM = Slo(harm=0.5)
ROWS = [Candidate(f"row{n}", 400, 0) for n in range(8)]


def beside(slo: Slo = HARM, **changes: Any) -> View:
    """Ten live requests that decode, 20 ms together, and rows that could use any time."""
    given: dict[str, Any] = {"online": decodes(10, "live"), "offline": ROWS, "slo": slo}
    return view_of(**{**given, **changes})


def offline_tokens(view: View) -> int:
    return sum(tokens for name, tokens in Conserve().plan(view).tokens.items() if name.startswith("row"))


@pytest.mark.parametrize(("harm", "tokens"), [(0.1, 2), (0.5, 10), (1.0, 20)])
def test_rows_add_a_share_of_the_live_requests_own_time(harm: float, tokens: int) -> None:
    assert offline_tokens(beside(Slo(harm=harm))) == tokens


def test_without_the_promise_rows_take_what_the_engine_takes() -> None:
    assert offline_tokens(beside(Slo())) == 2048 - 10


def test_an_slo_and_harm_bound_both() -> None:
    assert offline_tokens(beside(Slo(tbt_ms=25, harm=0.5))) == 5
    assert offline_tokens(beside(Slo(tbt_ms=100, harm=0.5))) == 10


def test_beside_a_prompt_rows_add_little_since_requests_queue_for_prompts() -> None:
    prompt = [Candidate("prompt", 990, 0)]
    assert offline_tokens(beside(online=prompt)) == PATIENCE * 1000
    assert offline_tokens(beside(online=prompt, slo=Slo(harm=0.01))) == 10


@pytest.mark.parametrize(("own_ms", "tokens"), [(2.0, 7), (4.0, 4), (19.0, 0), (30.0, 0)])
def test_what_scheduling_takes_of_ours_counts_as_added(own_ms: float, tokens: int) -> None:
    """Stock vLLM would take 18 ms where we take 2 of 20, and half of that again is 27."""
    assert offline_tokens(beside(own_ms=own_ms)) == tokens
    assert len(Conserve().plan(beside(own_ms=own_ms)).tokens) >= 10, "the live requests are not held up"


def test_where_our_scheduling_takes_the_whole_share_there_is_no_limit_to_stay_below() -> None:
    view = beside(own_ms=30.0)
    composer = Composer(view)
    add_steps(composer, view.online)
    assert harm_limit_ms(composer, view) == 0.0


@pytest.mark.parametrize(("busy", "tokens"), [(0.0, 10), (0.5, 4), (0.9, 0)])
def test_rows_get_less_where_live_requests_queue(busy: float, tokens: int) -> None:
    """Of 20 ms with 10 decode steps, half."""
    assert offline_tokens(beside(live_busy=busy)) == tokens


def test_a_harm_beside_a_promise_in_ms_is_of_latencies_too() -> None:
    assert offline_tokens(beside(Slo(tbt_ms=1000.0, harm=0.5), live_busy=0.5)) == 4


def test_where_a_promise_in_ms_is_not_kept_the_harm_is_that_of_iterations() -> None:
    broken = Slo(ttft_ms=1000, tbt_ms=100, stand_in_tbt_harm=0.5)
    assert offline_tokens(beside(broken, live_busy=0.5)) == offline_tokens(beside(broken)) == 10
    assert offline_tokens(beside(Slo(ttft_ms=1000, stand_in_tbt_harm=0.5), live_busy=0.5)) == 4, (
        "none is promised"
    )


def test_what_scheduling_takes_is_no_harm_to_a_promise_in_ms() -> None:
    assert offline_tokens(beside(Slo(tbt_ms=25), own_ms=4.0)) == 5


def test_the_margin_is_on_what_is_added_alone() -> None:
    noisy = FrozenModel(MS_PER_TOKEN, scale=1.0, margins={step_of(20.0): 1.25})
    tokens = offline_tokens(beside(model=noisy))
    assert tokens == 8, "10 ms that a quarter is kept of"


@pytest.mark.parametrize("margins", [(1.1, 1.3), (1.5, 1.2), (1.2, 1.2)])
def test_margins_that_differ_by_length_change_little(margins: tuple[float, float]) -> None:
    alone, beyond = margins  # of 20 ms, and of the 25 and more ms with rows
    noisy = FrozenModel(MS_PER_TOKEN, scale=1.0, margins={step_of(20.0): alone, step_of(29.0): beyond})
    tokens = offline_tokens(beside(model=noisy))
    assert 10 / max(margins) - 1 <= tokens <= 10


def test_the_margin_is_that_of_iterations_as_long_as_this_one_becomes() -> None:
    """30 ms with rows; shorter iterations scatter by other shares, and so do longer ones."""
    margins = {step_of(10.0): 2.0, step_of(20.0): 1.0, step_of(30.0): 1.25, step_of(50.0): 2.0}
    noisy = FrozenModel(MS_PER_TOKEN, scale=1.0, margins=margins)
    assert offline_tokens(beside(model=noisy)) == 8, "10 ms that a quarter is kept of"


def test_the_limit_leaves_room_for_the_margin_at_its_own_length() -> None:
    noisy = FrozenModel(MS_PER_TOKEN, scale=1.0, margins={27: 1.2, 28: 1.2, 29: 1.5})  # 108, 128, 152 ms
    assert limit_ms_for(noisy.margin, 100.0) == pytest.approx(120)
    assert noisy.can_schedule(Batch(), Slice(500, 0), limit_ms_for(noisy.margin, 100.0) * (1 + 1e-9)) == 90


@pytest.mark.parametrize(
    "margins",
    [
        {26: 1.5, 27: 1.5, 28: 1.5, 29: 1.05, 30: 1.05},  # longer iterations scatter by less: 91 to 181 ms
        {26: 1.05, 27: 1.05, 28: 1.5, 29: 1.5, 30: 1.5},
        {26: 1.5, 27: 1.05, 28: 1.5, 29: 1.05, 30: 1.5},
        {26: 0.8, 27: 0.8, 28: 0.8, 29: 3.0, 30: 3.0},  # shorter ones take less than predicted
    ],
)
@pytest.mark.parametrize("wanted_ms", [92, 100, 108, 120])
def test_no_limit_lets_iterations_be_longer_than_wanted_where_margins_differ_much(
    margins: dict[int, float], wanted_ms: int
) -> None:
    noisy = FrozenModel(MS_PER_TOKEN, scale=1.0, margins=margins)
    tokens = noisy.can_schedule(Batch(), Slice(500, 0), limit_ms_for(noisy.margin, wanted_ms))
    assert wanted_ms / 2 <= tokens <= wanted_ms


def test_what_live_tokens_cost_beyond_the_model_is_not_taken_from_the_rows() -> None:
    prompt = Candidate("prompt", 90, 0, surcharge_ms=0.5)
    assert offline_tokens(beside(online=[prompt])) == PATIENCE * 100


def test_of_several_classes_those_in_the_iteration_bound_it() -> None:
    classes: dict[str, Any] = {"slos": {"chat": HARM, "agent": Slo(harm=0.1)}, "slo": Slo(harm=0.1)}
    chats = {f"live{n}": "chat" for n in range(10)}
    assert offline_tokens(beside(**classes, classes=chats)) == 10
    assert offline_tokens(beside(**classes, classes={**chats, "live9": "agent"})) == 2


def test_a_promise_in_ms_to_one_class_is_none_to_another() -> None:
    """Each class keeps what it has alone, and the smaller share holds."""
    chat = Slo(ttft_ms=1000, stand_in_tbt_harm=0.5)
    slow = Slo(ttft_ms=1000, tbt_ms=1000)
    several: dict[str, Any] = {"slos": {"chat": chat, "slow": slow}, "slo": tightest([chat, slow])}
    classes = {f"live{n}": "chat" if n else "slow" for n in range(10)}
    assert offline_tokens(beside(**several, classes=classes, live_busy=0.5)) == 4
    assert offline_tokens(beside(**several, classes=dict.fromkeys(classes, "chat"), live_busy=0.5)) == 4
    broken = {**several, "slos": {"chat": Slo(harm=0.9), "slow": replace(slow, stand_in_tbt_harm=0.5)}}
    assert offline_tokens(beside(**broken, classes=classes, live_busy=0.5)) == 6, (
        "(0.9 * 0.5) / 1.45 of 20 ms"
    )


def test_rows_run_alone_where_no_live_request_is() -> None:
    assert offline_tokens(view_of(offline=ROWS, slo=HARM)) == 100, (
        "ten times the smallest iteration, less 10 ms"
    )


class TestArrivals:
    """Longest iteration of rows alone."""

    def test_where_rows_join_again_a_layer_takes_half_of_what_an_arrival_may_wait(self) -> None:
        view = view_of(slo=HARM, rows_leave=True, rows_join=True, layers=4, prompt_tokens=190)
        assert harmless_wait_ms(view) == pytest.approx(4 * 0.25 * 200)

    def test_it_loses_a_fifth_to_its_constant_part_at_most_and_one_percent_where_nobody_came(self) -> None:
        joins: dict[str, Any] = {"slo": HARM, "rows_leave": True, "rows_join": True, "layers": 4}
        assert harmless_wait_ms(view_of(**joins, prompt_tokens=1)) == pytest.approx(55)
        assert harmless_wait_ms(view_of(**joins, rare_starts=True)) == pytest.approx(1100)

    def test_where_rows_cannot_leave_it_is_a_share_of_a_typical_prompt(self) -> None:
        assert harmless_wait_ms(view_of(slo=HARM, prompt_tokens=90)) == pytest.approx(50)
        assert harmless_wait_ms(view_of(slo=HARM, prompt_tokens=5)) == pytest.approx(22), (
            "two of the smallest iterations"
        )
        assert harmless_wait_ms(view_of(slo=HARM, prompt_tokens=2000)) == pytest.approx(110)

    def test_where_all_rows_leave_together_an_arrival_waits_for_none(self) -> None:
        view = view_of(slo=HARM, rows_leave=True, prompt_tokens=5, arrivals_per_s=1)
        assert harmless_wait_ms(view) == pytest.approx(110)

    def test_a_turn_of_rows_alone_would_double_a_gap(self) -> None:
        live = beside(rows_leave=True)
        assert offline_turn_ms(live, 100.0) == 0.0
        assert offline_turn_ms(beside(Slo(ttft_ms=1000, tbt_ms=200), rows_leave=True), 100.0) > 0


class TestBroken:
    """While a largest promise is not kept, offline tokens are bound by a harm; for each latency apart."""

    def test_gaps_that_are_late_too_often_bound_what_goes_beside_decode_steps(self) -> None:
        slo = Slo(ttft_ms=1000, tbt_ms=100)
        assert offline_tokens(beside(slo)) == 80
        assert offline_tokens(beside(replace(slo, stand_in_tbt_harm=0.1))) == 2
        assert offline_tokens(beside(replace(slo, stand_in_ttft_harm=0.1))) == 80
        assert offline_tokens(beside(replace(slo, harm=0.05, stand_in_tbt_harm=0.1))) == 1

    @pytest.mark.parametrize("rows_leave", [False, True])
    def test_beside_gaps_that_live_requests_alone_make_late_rows_get_nothing(self, rows_leave: bool) -> None:
        slo = Slo(ttft_ms=1000, tbt_ms=15, stand_in_tbt_harm=0.1)
        assert offline_tokens(beside(slo, rows_leave=rows_leave)) == 0

    def test_first_tokens_that_are_late_too_often_bound_what_an_arrival_waits_for(self) -> None:
        assert harmless_wait_ms(view_of(slo=Slo(stand_in_tbt_harm=0.1), prompt_tokens=90)) == inf
        assert harmless_wait_ms(view_of(slo=Slo(stand_in_ttft_harm=0.5), prompt_tokens=90)) == pytest.approx(
            50
        )

    def test_no_turn_of_rows_alone_makes_another_gap_late(self) -> None:
        slo = Slo(ttft_ms=1000, tbt_ms=200)
        assert offline_turn_ms(beside(replace(slo, stand_in_ttft_harm=0.1), rows_leave=True), 100.0) > 0
        assert offline_turn_ms(beside(replace(slo, stand_in_tbt_harm=0.1), rows_leave=True), 100.0) == 0.0

    def test_among_classes_the_smallest_harm_holds(self) -> None:
        several = [Slo(stand_in_ttft_harm=0.1), Slo(harm=0.3), Slo(harm=0.2, stand_in_tbt_harm=0.1)]
        assert (tightest(several).ttft_harm, tightest(several).tbt_harm) == (0.1, 0.1)
        assert (tightest(several[1:]).ttft_harm, tightest(several[1:2]).tbt_harm) == (0.2, 0.3)


class TestLargest:
    """Live requests are planned among themselves by the largest promise, rows by what accounts allow now."""

    def test_a_prompt_is_not_cut_for_the_sake_of_the_median(self) -> None:
        prompt, slo = Candidate("prompt", 100, 0), Slo(ttft_ms=1e4, tbt_ms=40, largest_tbt_ms=150)
        assert Conserve().plan(beside(slo, waiting_online=[prompt])).tokens["prompt"] == 100
        cut = Conserve().plan(beside(Slo(ttft_ms=1e4, tbt_ms=40), waiting_online=[prompt]))
        assert cut.tokens["prompt"] == 20

    def test_rows_have_what_the_accounts_allow(self) -> None:
        assert offline_tokens(beside(Slo(tbt_ms=40, largest_tbt_ms=150))) == 20
        assert offline_tokens(beside(Slo(tbt_ms=150, largest_tbt_ms=150))) == 130

    def test_a_gap_is_not_stretched_for_a_first_token_that_the_median_may_miss(self) -> None:
        slow, slo = Candidate("prompt", 100, 0, age_ms=300), Slo(ttft_ms=250, tbt_ms=40)
        assert Conserve().plan(beside(slo, online=[*decodes(5), slow])).tokens["prompt"] == 100
        patient = Slo(ttft_ms=250, tbt_ms=40, largest_ttft_ms=2000)
        assert Conserve().plan(beside(patient, online=[*decodes(5), slow])).tokens["prompt"] == 25


@pytest.mark.parametrize("classes", [False, True])
def test_first_tokens_have_a_harm_where_the_tbt_alone_is_promised(*, classes: bool) -> None:
    """A prompt and a step take 1,000 ms, and rows would fill their iteration up to the TBT."""
    slo = Slo(tbt_ms=1200.0, stand_in_ttft_harm=0.1)
    bounds: dict[str, Any] = {"slo": Slo(), "slos": {"default": slo}} if classes else {"slo": slo}
    prompt = Candidate("prompt", 989, 0)
    assert offline_tokens(beside(online=[prompt, *decodes(1, "live")], **bounds)) == PATIENCE * 1000
    assert offline_tokens(beside(online=decodes(1, "live"), **bounds)) == 1200 - 11
