"""Live traffic that the engine core remembers: the last minute, and nothing of requests that are gone."""

from dataclasses import replace
from fractions import Fraction
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.engine.policy.promises import Promises
from conserve.engine.policy.view import DEFAULT_CLASS, Slo
from conserve.engine.runtime.class_traffic import WINDOW_S
from conserve.engine.runtime.ranked import Moment, Ranked, quantiles
from conserve.engine.runtime.traffic import RECENT_PROMPTS, Traffic
from conserve.names import DEFAULT_HARM

PROMISES = Promises.of({"ttft_ms": 1000.0, "tbt_ms": 100.0})
NO_PROMISES: dict[str, Any] = {"ttft_ms": {}, "tbt_ms": {}}


def answer(
    traffic: Traffic, request: str, *, at: float, ttft_s: float = 0.5, gaps_s: tuple[float, ...] = ()
) -> None:
    """A request that arrives, gets its tokens and leaves."""
    traffic.arrived(request, 10, at=at)
    at += ttft_s
    traffic.tokens([request], at=at)
    for gap_s in gaps_s:
        at += gap_s
        traffic.tokens([request], at=at)
    traffic.finished(request)


def test_nothing_has_happened_yet() -> None:
    nothing = {"p50": None, "p99": None}
    report = Traffic().report(now=5.0)
    counts = [sum(one["counts"]) for one in report["online"].pop("histograms").values()]
    assert counts == [0, 0]
    assert report["online"].pop("counts") == {name: {"all": 0, "late": 0} for name in ("ttft_ms", "tbt_ms")}
    assert report == {
        "online": {
            "requests": 0,
            "ttft_ms": nothing,
            "tbt_ms": nothing,
            "attainment": 1.0,
            "held_back": [],
            "paused_for": [],
            "way_ms": {"ttft_ms": {}, "tbt_ms": {}},
            "promises": NO_PROMISES,
        },
        "offline": {"tokens": 0, "tokens_per_s": 0.0},
    }


def test_clients_that_leave_after_more_than_is_promised_are_late() -> None:
    """Clients with a time-out waited longest: without them a server that answers none would look well."""
    traffic = Traffic(PROMISES)
    for number in range(20):
        traffic.arrived(str(number), 10, at=float(number))
        traffic.finished(str(number), aborted_at=number + 1.5)
    online = traffic.report(now=30.0)["online"]
    assert (online["requests"], online["attainment"], online["held_back"]) == (0, 0.0, ["ttft_ms"])
    assert online["ttft_ms"] == pytest.approx({"p50": 1500, "p99": 1500})
    assert sum(online["histograms"]["ttft_ms"]["counts"]) == 20
    assert online["counts"]["ttft_ms"] == {"all": 20, "late": 20}
    assert traffic.online_now == 0


def test_clients_that_leave_sooner_say_nothing() -> None:
    traffic = Traffic(PROMISES)
    traffic.arrived("a", 10, at=0.0)
    traffic.finished("a", aborted_at=0.9)
    traffic.arrived("b", 10, at=0.0)
    traffic.finished("b")
    assert traffic.report(now=30.0)["online"]["ttft_ms"]["p50"] is None


def test_without_a_promise_a_wait_longer_than_all_others_counts() -> None:
    traffic = Traffic()
    answer(traffic, "a", at=0.0, ttft_s=0.5)
    for request, left_at in (("b", 0.4), ("c", 2.0)):
        traffic.arrived(request, 10, at=0.0)
        traffic.finished(request, aborted_at=left_at)
    assert traffic.report(now=30.0)["online"]["ttft_ms"] == pytest.approx({"p50": 500, "p99": 2000})


def test_the_first_token_counts_for_ttft_and_the_others_for_tbt() -> None:
    traffic = Traffic()
    answer(traffic, "a", at=10.0, ttft_s=0.25, gaps_s=(0.05, 0.05, 0.2))
    online = traffic.report(now=11.0)["online"]
    assert online["requests"] == 1
    assert online["ttft_ms"]["p50"] == pytest.approx(250)
    assert online["tbt_ms"] == pytest.approx({"p50": 50, "p99": 200})


def test_tokens_of_several_requests_are_told_apart() -> None:
    traffic = Traffic()
    for request, at in (("a", 0.0), ("b", 0.1)):
        traffic.arrived(request, 10, at=at)
    traffic.tokens(["a"], at=1.0)
    traffic.tokens(["a", "b", "offline"], at=1.5)
    traffic.tokens(["a", "b", "offline"], at=1.6)
    online = traffic.report(now=2.0)["online"]
    assert online["requests"] == 2
    assert online["ttft_ms"] == pytest.approx({"p50": 1000, "p99": 1400})
    assert online["tbt_ms"] == pytest.approx({"p50": 100, "p99": 500})


def test_an_attainment_is_that_of_the_promise_that_is_kept_less_often() -> None:
    traffic = Traffic(PROMISES)
    answer(traffic, "a", at=0.0, ttft_s=2.0, gaps_s=(0.01, 0.01))
    answer(traffic, "b", at=0.0, ttft_s=0.5, gaps_s=(0.01, 0.2))
    assert traffic.report(now=3.0)["online"]["attainment"] == 0.5
    counts = traffic.report(now=3.0)["online"]["counts"]
    assert counts == {"ttft_ms": {"all": 2, "late": 1}, "tbt_ms": {"all": 4, "late": 1}}
    traffic.promise(Promises.of({"tbt_ms": 100.0}))
    assert traffic.report(now=3.0)["online"]["attainment"] == 0.75
    traffic.promise(Promises.of({"tbt_ms": {"p50": 20.0, "p99": 100.0}}))
    assert traffic.report(now=3.0)["online"]["attainment"] == 0.75
    traffic.promise(Promises.of({"tbt_ms": {"p50": 20.0, "mean": 100.0}}))
    assert traffic.report(now=3.0)["online"]["attainment"] == 1.0, "half of them may be longer"
    traffic.promise(Promises())
    assert traffic.report(now=3.0)["online"]["attainment"] == 1.0


def test_latencies_that_are_late_too_often_are_reported_until_they_are_kept_again() -> None:
    chat, agents = Promises.of({"tbt_ms": 100.0}), Promises.of({"ttft_ms": 900.0, "tbt_ms": 100.0})
    traffic = Traffic(chat, classes={"agents": agents})
    traffic.arrived("a", 10, at=0.0, live_class="agents")
    traffic.tokens(["a"], at=0.5)
    for number in range(1, 9):
        traffic.tokens(["a"], at=0.5 + 0.2 * number)
    report = traffic.report(now=3.0)
    assert report["online"]["held_back"] == report["classes"]["agents"]["held_back"] == ["tbt_ms"]
    assert report["classes"][DEFAULT_CLASS]["held_back"] == []
    assert traffic.bounds(now=3.0).stand_in_tbt_harm == DEFAULT_HARM
    traffic.finished("a")
    assert traffic.report(now=63.0)["online"]["held_back"] == [], "no live request is there to be late"
    traffic.arrived("b", 10, at=63.0)
    assert traffic.bounds(now=63.0).stand_in_tbt_harm is None, "of a class that none uses"
    traffic.arrived("a", 10, at=2.0, live_class="agents")
    traffic.tokens(["a"], at=2.1)
    for number in range(2000):
        traffic.tokens(["a"], at=2.1 + 0.05 * (number + 1))
    assert traffic.report(now=103.0)["online"]["held_back"] == []


def test_each_promise_is_reported_beside_what_was_seen() -> None:
    traffic = Traffic(Promises.of({"ttft_ms": {"p50": 100, "p99": 900}, "tbt_ms": {"mean": 30}}))
    answer(traffic, "a", at=0.0, ttft_s=0.25, gaps_s=(0.01, 0.04))
    said = traffic.report(now=3.0)["online"]["promises"]
    assert said["ttft_ms"]["p50"] == {"promised_ms": 100.0, "seen_ms": pytest.approx(250), "kept": False}
    assert said["ttft_ms"]["p99"]["kept"]
    assert said["tbt_ms"]["mean"] == {"promised_ms": 30.0, "seen_ms": pytest.approx(25), "kept": True}


def test_the_bound_on_the_next_iteration_follows_from_the_latencies_so_far() -> None:
    traffic = Traffic(Promises.of({"tbt_ms": {"p50": 40, "p99": 150}, "harm": 0.5}))
    short = Slo(tbt_ms=40.0, harm=0.5, largest_ttft_ms=inf, largest_tbt_ms=150.0)
    assert traffic.bounds(now=0.0) == short
    answer(traffic, "a", at=0.0, gaps_s=(0.02,) * 10)
    assert traffic.bounds(now=0.0) == replace(short, tbt_ms=150.0)
    answer(traffic, "b", at=5.0, gaps_s=(0.1, 0.1))
    assert traffic.bounds(now=0.0) == short


def test_a_p99_that_is_late_too_often_bounds_what_offline_tokens_add_until_it_is_kept_again() -> None:
    traffic = Traffic(Promises.of({"ttft_ms": 1000, "tbt_ms": 150}))
    kept = Slo(ttft_ms=1000.0, tbt_ms=150.0, largest_ttft_ms=1000.0, largest_tbt_ms=150.0)
    assert traffic.bounds(now=0.0) == kept
    answer(traffic, "a", at=0.0, gaps_s=(0.2,) * 3)
    assert traffic.bounds(now=1.0) == kept, "a burst is no broken promise"
    answer(traffic, "b", at=1.0, gaps_s=(0.2,) * 2)
    assert traffic.bounds(now=2.0) == replace(kept, stand_in_tbt_harm=DEFAULT_HARM)
    for number in range(5):
        answer(traffic, f"late{number}", at=2.0, ttft_s=1.5, gaps_s=(0.1,) * 50)
    assert traffic.bounds(now=20.0) == replace(kept, stand_in_ttft_harm=DEFAULT_HARM)


def test_a_report_covers_the_last_minute() -> None:
    traffic = Traffic()
    answer(traffic, "early", at=0.0, ttft_s=9.0, gaps_s=(5.0,))
    answer(traffic, "late", at=WINDOW_S, ttft_s=0.5, gaps_s=(0.05,))
    online = traffic.report(now=WINDOW_S + 20.0)["online"]
    assert online["ttft_ms"]["p99"] == pytest.approx(500)
    assert online["tbt_ms"]["p99"] == pytest.approx(50)
    assert online["requests"] == 2, "counts are since the start"


def test_offline_tokens_are_counted_for_good_and_their_rate_by_the_minute() -> None:
    traffic = Traffic()
    traffic.offline(500, at=0.0)
    traffic.offline(500, at=10.0)
    assert traffic.report(now=10.0)["offline"] == {"tokens": 1000, "tokens_per_s": 100.0}
    assert traffic.report(now=65.0)["offline"] == {"tokens": 1000, "tokens_per_s": 500 / WINDOW_S}
    traffic.offline(600, at=200.0)
    after_a_pause = traffic.report(now=201.0)["offline"]
    assert after_a_pause == {"tokens": 1600, "tokens_per_s": 600 / WINDOW_S}


def test_a_burst_at_the_start_is_not_a_rate_per_millisecond() -> None:
    traffic = Traffic()
    traffic.offline(500, at=7.0)
    assert traffic.report(now=7.001)["offline"]["tokens_per_s"] == 500


def test_a_typical_prompt_is_the_median_of_recent_ones() -> None:
    traffic = Traffic()
    assert traffic.typical_prompt(now=0.0) == 0
    for n, tokens in enumerate([10, 20, 3000]):
        traffic.arrived(str(n), tokens, at=0.0)
    assert traffic.typical_prompt(now=1.0) == 20
    for n in range(RECENT_PROMPTS):
        traffic.arrived(f"long-{n}", 3000, at=0.0)
    assert traffic.typical_prompt(now=WINDOW_S - 1) == 3000
    assert traffic.typical_prompt(now=WINDOW_S) == 0  # no arrival for a minute


def test_slots_are_expected_to_be_wanted_as_in_the_last_minute() -> None:
    traffic = Traffic()
    for n in range(5):
        traffic.arrived(str(n), 10, at=0.0)
    assert traffic.expected(now=0.0) == 0
    for n in range(4):
        traffic.finished(str(n))
    assert traffic.expected(now=1.0) == 4
    traffic.arrived("later", 10, at=30.0)
    assert traffic.expected(now=30.0) == 3
    assert traffic.expected(now=WINDOW_S + 1) == 0  # of the peak that counts now, both are here


def test_a_request_is_answered_from_its_first_token_until_it_is_over() -> None:
    traffic = Traffic()
    traffic.arrived("a", 10, at=0.0)
    assert not traffic.answered("a")
    traffic.tokens(["a"], at=1.0)
    assert traffic.answered("a")
    traffic.finished("a")
    assert not traffic.answered("a")
    traffic.tokens(["a"], at=2.0)
    assert not traffic.answered("a"), "a token that comes late brought it back"


def test_those_who_hang_up_leave_nothing_behind() -> None:
    traffic = Traffic()
    for n in range(100):
        traffic.arrived(str(n), 10, at=n)
        if n % 2:
            traffic.tokens([str(n)], at=n + 0.5)
        traffic.finished(str(n))
    assert not traffic._arrived_at
    assert not traffic._last_tokens
    assert traffic.report(now=100.0)["online"]["requests"] == 50, "those without a token do not count"


def test_a_week_without_a_report_does_not_fill_the_memory() -> None:
    traffic = Traffic()
    for n in range(5000):
        answer(traffic, str(n), at=float(n), gaps_s=(0.05,))
        traffic.offline(10, at=float(n))
    for window in (traffic._default.ttft_ms, traffic._default.tbt_ms, traffic._offline_tokens):
        assert len(window) <= WINDOW_S + 1


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=400), st.sampled_from([(0.5, 2), (0.99, 100)]))
def test_a_quantile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[float], rank: tuple[float, int]
) -> None:
    q, parts = rank
    exact = Fraction(parts - 1, parts)
    found = Ranked.of(values).at(q)
    assert found is not None
    assert Fraction(sum(value <= found for value in values), len(values)) >= exact
    assert Fraction(sum(value < found for value in values), len(values)) < exact


def test_quantiles_and_shares_of_nothing() -> None:
    assert quantiles(Ranked([])) == {"p50": None, "p99": None}
    assert (Ranked([]).mean, Ranked([]).within(1.0)) == (None, 1.0)
    assert Ranked.of([1.0, 2.0]).within(1.0) == 0.5
    assert Ranked.of([1.0, 2.0]).within(inf) == 1.0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=30), st.floats(0.01, 0.999))
def test_gaps_that_are_counted_together_rank_like_gaps_one_by_one(
    counted: list[tuple[int, int]], q: float
) -> None:
    together = Ranked(Moment(0.0, ms, times) for ms, times in counted)
    apart = Ranked.of(float(ms) for ms, times in counted for _ in range(times))
    assert (len(together), together.at(q), together.mean) == (len(apart), apart.at(q), apart.mean)
    assert [together.within(ms) for ms in range(10)] == [apart.within(ms) for ms in range(10)]


def test_a_report_of_any_number_of_gaps_looks_at_their_lengths_alone() -> None:
    many = Ranked([Moment(0.0, 10.0, 10**12), Moment(0.0, 20.0, 10**10)])
    assert (many.at(0.5), many.at(0.999), many.within(15.0)) == (10.0, 20.0, pytest.approx(100 / 101))


def test_requests_that_meet_a_quiet_iteration_are_rare_until_one_has_come_and_again_after_200() -> None:
    traffic, at = Traffic(), 1000.0
    assert traffic.rare_starts
    traffic.planned_quiet = True
    answer(traffic, "first", at=at)
    assert not traffic.rare_starts
    traffic.planned_quiet = False
    for n in range(199):
        answer(traffic, f"next-{n}", at=at + n)
        assert traffic.rare_starts == (n == 198)
    traffic.planned_quiet = True
    answer(traffic, "later", at=at + 2 * WINDOW_S)
    assert not traffic.rare_starts


def test_every_request_of_a_burst_in_a_quiet_iteration_counts() -> None:
    traffic = Traffic()
    traffic.planned_quiet = True
    for n in range(10):
        traffic.arrived(f"burst-{n}", 10, at=1000.0)
    traffic.planned_quiet = False
    for n in range(1000):
        answer(traffic, f"next-{n}", at=1001.0)
        assert traffic.rare_starts == (n >= 994), "five of ten are forgotten by then"


def test_a_request_beside_an_iteration_that_is_not_quiet_waits_for_no_long_one() -> None:
    traffic = Traffic()
    for n in range(199):
        traffic.arrived(f"next-{n}", 10, at=(n + 1) * 2 * WINDOW_S)
    assert traffic.rare_starts
