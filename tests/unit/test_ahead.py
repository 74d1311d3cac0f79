"""Iterations scheduled ahead beside online requests: when they pay, and how long rows may make them."""

from math import inf

import pytest

from conserve.engine.policy.ahead import LONG, ahead_limit_ms, pays
from conserve.engine.policy.view import Candidate, Slo
from tests.policy_views import MS_PER_TOKEN, decodes, plan_of, view_of

SMALLEST_MS = 11.0
ROWS = [Candidate("row", 5000, 0)]


@pytest.mark.parametrize(
    ("slo", "ahead"),
    [
        (Slo(ttft_ms=500, tbt_ms=LONG * SMALLEST_MS), True),
        (Slo(ttft_ms=500, tbt_ms=LONG * SMALLEST_MS + 1), False),
        (Slo(ttft_ms=500), False),
        (Slo(), False),
        (Slo(harm=0.1), True),
        (Slo(ttft_ms=500, tbt_ms=5000, broken_tbt_harm=0.1), True),
        (Slo(ttft_ms=500, tbt_ms=5000, broken_ttft_harm=0.1), False),
    ],
)
def test_it_pays_where_the_promises_ask_for_short_iterations(slo: Slo, ahead: bool) -> None:
    assert pays(slo, MS_PER_TOKEN) is ahead


def test_an_arrival_waits_for_two_iterations_in_half_of_its_slack() -> None:
    view = view_of(slo=Slo(ttft_ms=430), prompt_tokens=20)  # which take 30 ms
    assert ahead_limit_ms(view, 12.0, 1000.0) == (430 - 30) / 2 / 2
    assert ahead_limit_ms(view, 12.0, 110.0) == 55.0


def test_rows_add_a_fiftieth_of_the_ttft_promise_to_the_two_whatever_they_take_alone() -> None:
    view = view_of(slo=Slo(ttft_ms=50), prompt_tokens=100)
    assert ahead_limit_ms(view, 12.0, 110.0) == 12.0 + 0.02 * 50 / 2


def test_without_a_ttft_promise_there_is_no_limit() -> None:
    assert ahead_limit_ms(view_of(), 12.0, 110.0) == inf


def test_rows_fill_an_iteration_up_to_a_quarter_of_an_arrival_s_slack() -> None:
    slo = Slo(ttft_ms=110, tbt_ms=1000)
    alone = plan_of(slo=slo, online=decodes(1), waiting_offline=ROWS, prompt_tokens=20)
    ahead = plan_of(slo=slo, online=decodes(1), waiting_offline=ROWS, prompt_tokens=20, ahead=True)
    assert alone.predicted_ms == 110 - 30
    assert ahead.predicted_ms == (110 - 30) / 4


def test_a_tight_tbt_promise_holds_whether_or_not_iterations_are_ahead() -> None:
    slo = Slo(ttft_ms=2000, tbt_ms=25)
    for ahead in (False, True):
        plan = plan_of(slo=slo, online=decodes(1), waiting_offline=ROWS, prompt_tokens=20, ahead=ahead)
        assert plan.predicted_ms == 25
