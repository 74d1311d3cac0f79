"""Iterations scheduled ahead beside online requests: when they pay, and how long rows may make them."""

from math import inf

import pytest

from conserve.engine.policy.ahead import LONG, ahead_limit_ms, pays
from conserve.engine.policy.kv_groups import KvGroup
from conserve.engine.policy.recorded import (
    VERSION,
    VERSION_OF_AHEAD,
    VERSION_OF_GROUPS,
    VERSION_OF_RESTING,
    line_of,
    recorded,
    version_of,
)
from conserve.engine.policy.view import Candidate, Slo
from conserve.profiles.correction import CorrectedModel
from conserve.profiles.margin import Residual
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
        (Slo(ttft_ms=500, tbt_ms=5000, stand_in_tbt_harm=0.1), True),
        (Slo(ttft_ms=500, tbt_ms=5000, stand_in_ttft_harm=0.1), False),
    ],
)
def test_it_pays_where_the_promises_ask_for_short_iterations(slo: Slo, ahead: bool) -> None:
    assert pays(slo, MS_PER_TOKEN) is ahead


def test_an_arrival_waits_for_two_iterations_in_half_of_its_slack() -> None:
    view = view_of(slo=Slo(ttft_ms=430), prompt_tokens=20)  # which take 30 ms
    assert ahead_limit_ms(view, 12.0, 1000.0) == (430 - 30) / 2 / 2
    assert ahead_limit_ms(view, 12.0, 110.0) == 55.0


@pytest.mark.parametrize(("ttft_ms", "online_ms"), [(50.0, 12.0), (10.0, 0.0)])
def test_rows_add_a_fiftieth_of_the_ttft_promise_to_the_two_whatever_they_take_alone(
    ttft_ms: float, online_ms: float
) -> None:
    view = view_of(slo=Slo(ttft_ms=ttft_ms), prompt_tokens=100)
    assert ahead_limit_ms(view, online_ms, 110.0) == online_ms + 0.02 * ttft_ms / 2


def test_without_a_ttft_promise_there_is_no_limit() -> None:
    corrected = CorrectedModel(MS_PER_TOKEN, [Residual(20.0, 1.1)] * 200)
    for model in (MS_PER_TOKEN, corrected):
        assert ahead_limit_ms(view_of(model=model), 12.0, 110.0) == inf


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


def test_the_margin_is_kept_from_what_rows_add_alone() -> None:
    """A model that is off by as much as it was on a first GPU would leave rows nothing otherwise."""
    model = CorrectedModel(MS_PER_TOKEN, [Residual(2000.0, 1.4)] * 200)
    view = view_of(model=model, slo=Slo(ttft_ms=1000), prompt_tokens=900)
    limit_ms = ahead_limit_ms(view, 12.0, 110.0)
    assert limit_ms == pytest.approx((12.0 + 10.0 / 1.4) * 1.4)
    plan = plan_of(
        model=model,
        slo=Slo(ttft_ms=1000),
        prompt_tokens=900,
        online=decodes(2),
        waiting_offline=ROWS,
        ahead=True,
    )
    assert plan.total > 2


def test_in_batching_mode_an_arrival_waits_for_two_as_well() -> None:
    quiet = {"slo": Slo(ttft_ms=4000), "waiting_offline": ROWS}
    assert plan_of(**quiet).predicted_ms == 2000
    assert plan_of(**quiet, ahead=True).predicted_ms == 1000


def test_harm_of_two_iterations_of_rows_alone_is_what_an_arrival_waits() -> None:
    harm = {"slo": Slo(harm=0.1), "waiting_offline": ROWS, "prompt_tokens": 890, "arrivals_per_s": 1.0}
    assert plan_of(**harm).predicted_ms == 90
    assert plan_of(**harm, ahead=True).predicted_ms == 45


def test_an_earlier_conserve_refuses_a_recorded_view_that_it_would_plan_otherwise() -> None:
    view = view_of(ahead=True)
    assert (version_of(view_of()), version_of(view)) == (VERSION, VERSION_OF_AHEAD)
    assert recorded(line_of(view, None, policy="conserve", at=0.0)).view.ahead
    grouped = view_of(kv_groups=[KvGroup(16), KvGroup(16, 255, 150)])
    named = view_of(adapters={"row": 3, "gone": 4}, most_adapters=1, waiting_offline=ROWS)
    assert recorded(line_of(named, None, policy="conserve", at=0.0)).view.adapters == {"row": 3}
    assert version_of(grouped) == VERSION_OF_GROUPS
    resting = view_of(resting_adapters=[3], most_adapters=1, parks=True)
    assert version_of(resting) == VERSION_OF_RESTING
    assert [*recorded(line_of(resting, None, policy="conserve", at=0.0)).view.resting_adapters] == [3]
    assert recorded(line_of(grouped, None, policy="conserve", at=0.0)).view.kv_groups == grouped.kv_groups
