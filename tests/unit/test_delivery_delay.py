"""The delay of delivery: two distributions, and bounds that are tighter by their difference."""

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.cli.server_status import on_the_way
from conserve.engine.policy.promises import Promises
from conserve.engine.runtime.accountant import LEAST_SHARE, Account, Accountant, in_engine
from conserve.engine.runtime.class_traffic import ClassTraffic
from conserve.engine.runtime.delivery_delay import FADES_S, FORGOTTEN_S, DeliveryDelay, LatencyDelay
from conserve.engine.runtime.traffic import Traffic
from conserve.server_report import ByLatency
from tests.reach import reached

TTFT, TBT = "ttft_ms", "tbt_ms"
EXACT = 0.05  # two bins of 2 %, and what is between


def delay_of(*pairs: tuple[float, float], times: int = 1) -> LatencyDelay:
    found = LatencyDelay()
    for _ in range(times):
        for engine_ms, client_ms in pairs:
            found.note(engine_ms, client_ms)
    return found


# Two distributions


def test_a_quantile_of_clients_is_compared_with_the_same_quantile_of_the_engine() -> None:
    late = [(20.0, 20.0)] * 95 + [(20.0, 30.0)] * 5  # one token in twenty waits on its way
    delay = delay_of(*late, times=10)
    assert delay.delay_ms("p50") == 0
    assert delay.delay_ms("p99") == pytest.approx(10, rel=EXACT)
    assert delay.delay_ms("mean") == pytest.approx(0.5, abs=1e-9)


def test_long_latencies_hide_a_way_that_does_not_reach_their_quantile() -> None:
    delay = delay_of(*[(20.0, 28.0)] * 90, *[(100.0, 100.0)] * 10)
    assert delay.delay_ms("p50") == pytest.approx(8, rel=EXACT)
    assert delay.delay_ms("p99") == 0


def test_few_latencies_tell_of_no_higher_quantile_than_they_reach() -> None:
    assert delay_of(*[(10.0, 40.0)] * 5).delay_ms("p50") == 0, "five say nothing"
    outlier = delay_of(*[(10.0, 10.0)] * 39, (10.0, 1000.0))
    assert outlier.delay_ms("p99") == 0, "one of forty is not their P99"


def test_clients_are_never_before_the_engine() -> None:
    assert delay_of((30.0, 20.0), times=50).delay_ms("p99") == 0
    assert delay_of((30.0, 20.0), times=50).delay_ms("mean") == 0


def test_what_was_long_ago_counts_no_more() -> None:
    delay = DeliveryDelay()
    delay.fade(now=0.0)
    for _ in range(100):
        delay.latencies[TTFT].note(10.0, 60.0)
    delay.fade(now=1.0)
    assert delay.delays_ms({TTFT: ["p50"]}) == {TTFT: {"p50": pytest.approx(50, rel=EXACT)}, TBT: {}}
    delay.fade(now=1.0 + 20 * FADES_S)
    assert delay.delays_ms({TTFT: ["p50"]}) == {TTFT: {"p50": 0.0}, TBT: {}}


@given(st.lists(st.tuples(st.floats(0.1, 1e4), st.floats(0, 1e3)), min_size=6, max_size=60))
def test_a_way_is_no_longer_than_the_longest_of_its_answers(pairs: list[tuple[float, float]]) -> None:
    delay = delay_of(*((ms, ms + later_ms) for ms, later_ms in pairs))
    longest_ms = max(later_ms for _, later_ms in pairs)
    for name in ("p50", "p90", "p99", "mean"):
        delay_ms = delay.delay_ms(name)
        # An upper edge is 2 % beyond what is in the bin.
        assert 0 <= delay_ms <= longest_ms + 0.03 * max(ms + later_ms for ms, later_ms in pairs)
        reached("a delay is found", delay_ms > 1)


# Bounds in the engine


def test_a_promise_is_kept_earlier_in_the_engine_by_the_way() -> None:
    account = Account({"p50": 40.0, "p99": 150.0})
    account.tighten_by({"p50": 2.0, "p99": 12.0})
    assert account.ceiling_ms == 138
    assert account.bound_ms(1) == 38, "nothing is saved yet, so the median's bound holds"
    for _ in range(4):
        account.note(37.9)
    assert account.bound_ms(1) == 138
    account.tighten_by({})
    assert account.bound_ms(1) == 150, "what was saved stays"


def test_a_latency_between_both_bounds_is_late() -> None:
    account = Account({"p99": 100.0})
    for _ in range(3):
        account.note(95.0)
    assert not account.broken
    account.tighten_by({"p99": 10.0})
    for _ in range(9):
        account.note(95.0)
    assert account.broken


def test_a_mean_is_earlier_too() -> None:
    account = Account({"mean": 100.0})
    account.tighten_by({"mean": 20.0})
    assert account.bound_ms(1) == pytest.approx(72)


@given(
    st.lists(st.floats(1, 1e4), min_size=2, max_size=4),
    st.lists(st.floats(0, 1e4), min_size=4, max_size=4),
)
def test_bounds_stay_in_order_and_above_half_of_what_is_promised(
    bounds_ms: list[float], delays: list[float]
) -> None:
    names = ["p50", "p90", "p99", "p99.9"][: len(bounds_ms)]
    named = dict(zip(names, sorted(bounds_ms), strict=True))
    found = in_engine(named, dict(zip(names, delays, strict=False)))
    assert [found[name] for name in names] == sorted(found[name] for name in names)
    for name, ms in named.items():
        assert found[name] <= ms
        higher = [found[other] for other in names if named[other] >= ms]
        assert found[name] >= min(LEAST_SHARE * ms, *higher)
    reached(
        "a delay is half of a promise or longer",
        any(w >= ms / 2 for w, ms in zip(delays, named.values(), strict=False)),
    )


def test_the_slo_of_an_iteration_and_of_live_requests_among_themselves_is_earlier() -> None:
    accountant = Accountant(Promises.of({TTFT: 1500, TBT: {"p99": 100}, "harm": 0.2}))
    accountant.tighten_by({TTFT: {"p99": 30.0}, TBT: {"p99": 5.0}})
    slo = accountant.slo(waiting=0, decoding=1)
    assert (slo.ttft_ms, slo.tbt_ms) == (1470, 95)
    assert (slo.online_ttft_ms, slo.online_tbt_ms, slo.harm) == (1470, 95, 0.2)


def test_where_nothing_is_promised_a_way_bounds_nothing() -> None:
    accountant = Accountant(Promises.of({"harm": 0.1}))
    accountant.tighten_by({TTFT: {}, TBT: {}})
    slo = accountant.slo(waiting=0, decoding=1)
    assert (slo.ttft_ms, slo.tbt_ms, slo.online_ttft_ms) == (inf, inf, inf)


# In the scheduler's memory


def test_every_class_is_told_and_a_new_promise_keeps_the_way() -> None:
    traffic = Traffic(
        Promises.of({TTFT: {"p99": 1000}}), classes={"chat": Promises.of({TTFT: {"p90": 300}, TBT: 50})}
    )
    told: dict[str, Any] = {"default": {TTFT: {"p99": 40.0}}, "none such": {TTFT: {"p99": 70.0}}}
    assert traffic.report_delays(told, server="one", now=0.0) == {
        "chat": {TTFT: ["p90"], TBT: ["p99"]},
        "default": {TTFT: ["p99"], TBT: []},
    }
    assert traffic.ttft_ms("default") == 960
    assert traffic.ttft_ms("chat") == 300, "long bodies of one class delay no other"
    traffic.promise(Promises.of({TTFT: {"p99": 500}}))
    assert traffic.ttft_ms("default") == 460


def test_the_longest_delay_of_several_api_servers_counts_while_they_report_it() -> None:
    def reported(server: str, ms: float, now: float) -> float | None:
        traffic.report_delays({"chat": {TTFT: {"p90": ms}}}, server=server, now=now)
        return traffic.ttft_ms("chat")

    traffic = Traffic(classes={"chat": Promises.of({TTFT: {"p90": 300}})})
    assert reported("one", 40.0, 0.0) == 260
    assert reported("two", 10.0, 0.5) == 260
    assert reported("two", 60.0, 1.0) == 240
    assert reported("one", 0.0, 2.0) == 240
    assert reported("one", 5.0, 1.0 + FORGOTTEN_S - 0.1) == 240
    assert reported("one", 5.0, 1.0 + FORGOTTEN_S) == 295, "the other one is gone"


def test_the_report_says_the_way_of_each_promise() -> None:
    traffic = ClassTraffic(Promises.of({TTFT: {"p50": 100, "p99": 400}}))
    told: dict[str, Any] = {TTFT: {"p50": 3.0, "p99": 9.0, "mean": 4.0}}
    traffic.tighten_by(told)
    assert traffic.report(now=0.0, holds_back=True)["way_ms"] == {TTFT: {"p50": 3.0, "p99": 9.0}, TBT: {}}


def test_status_says_what_clients_have_later_from_a_millisecond_on() -> None:
    delays = {TTFT: {"p50": 0.4, "p99": 8.7}, TBT: {"p99": 1.2}}
    (line,) = on_the_way(ByLatency(**delays))
    assert line == "  clients  TTFT p99 9 ms, TBT p99 1 ms later than the engine, which plans for it"
    assert on_the_way(ByLatency(ttft_ms={"p99": 0.2}, tbt_ms={})) == []
