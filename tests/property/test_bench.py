"""Properties of every trace and of every comparison."""

from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from conserve.bench.answers import LoadAnswer, RequestEnd
from conserve.bench.attainment import LatencyLimits, attainment
from conserve.bench.harm import Clusters, change, clusters, percentile, resampled
from conserve.bench.measure import percentiles
from conserve.bench.pages.svg import Scale, log_ticks, ticks
from conserve.bench.traces import Arrival, Trace, gamma, on_off
from tests.reach import reached

tokens = st.integers(1, 100_000)
times = st.floats(0, 1e5)
latencies_ms = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    arrivals = draw(st.lists(st.builds(Arrival, times, tokens, tokens), min_size=1, max_size=50))
    arrivals.sort(key=lambda arrival: arrival.at_s)
    rest_s = draw(st.floats(1e-3, 100))
    return Trace(name="drawn", duration_s=arrivals[-1].at_s + rest_s, arrivals=tuple(arrivals))


def in_order(trace: Trace) -> bool:
    within = all(0 <= arrival.at_s <= trace.duration_s for arrival in trace)
    return within and all(one.at_s <= other.at_s for one, other in pairwise(trace))


def lengths(trace: Trace) -> list[tuple[int, int]]:
    return [(arrival.input_tokens, arrival.output_tokens) for arrival in trace]


@given(traces(), st.floats(1e-3, 1e3))
def test_scaling_keeps_the_requests_and_their_order(trace: Trace, speed: float) -> None:
    scaled = trace.scaled(speed)
    assert in_order(scaled)
    assert lengths(scaled) == lengths(trace)
    assert scaled.rate == pytest.approx(trace.rate * speed)


@given(traces(), st.floats(1e-3, 1e3))
def test_at_rate_gives_that_rate(trace: Trace, rate: float) -> None:
    assert trace.at_rate(rate).rate == pytest.approx(rate)
    assert lengths(trace.at_rate(rate)) == lengths(trace)


@given(traces(), times, st.floats(1e-3, 1e5))
def test_a_cut_and_what_lies_around_it_are_the_trace(trace: Trace, start_s: float, duration_s: float) -> None:
    inside = [a for a in trace if start_s <= a.at_s < min(start_s + duration_s, trace.duration_s)]
    assume(reached("arrivals within the cut", inside))
    cut = trace.cut(start_s, duration_s)
    assert in_order(cut)
    assert lengths(cut) == [(a.input_tokens, a.output_tokens) for a in inside]
    assert cut.duration_s <= duration_s * (1 + 1e-9) + 1e-9


@given(traces(), st.floats(1e-3, 2), st.floats(1e-3, 2), st.none() | tokens, st.none() | tokens)
def test_shortened_lengths_stay_between_one_and_the_most(
    trace: Trace, inputs: float, outputs: float, max_input: int | None, max_output: int | None
) -> None:
    shorter = trace.shortened(inputs, outputs, max_input, max_output)
    assert [a.at_s for a in shorter] == [a.at_s for a in trace]
    assert all(1 <= a.input_tokens <= (max_input or 200_000) for a in shorter)
    assert all(1 <= a.output_tokens <= (max_output or 200_000) for a in shorter)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=20), st.integers(0, 2**32))
def test_spreading_keeps_every_request_within_its_tick(sizes: list[int], seed: int) -> None:
    arrivals = tuple(
        Arrival(3.0 * n, 10 * n + place + 1, 1) for n, size in enumerate(sizes) for place in range(size)
    )
    trace = Trace(name="ticks", duration_s=3.0 * len(sizes), arrivals=arrivals)
    spread = trace.spread(seed)
    assert in_order(spread)
    assert lengths(spread) == lengths(trace)
    assert all(a.at_s <= b.at_s < a.at_s + 3 for a, b in zip(trace, spread, strict=True))
    assert spread == trace.spread(seed)


@given(st.floats(0.5, 50), st.floats(0, 8), st.floats(5, 100), st.integers(0, 2**32))
def test_drawn_arrivals_lie_in_order_within_the_duration(
    rate: float, cv: float, duration_s: float, seed: int
) -> None:
    try:
        drawn = [
            gamma(rate, cv, duration_s, 1, 1, seed),
            on_off(rate, 3.0, 2.0, duration_s, 1, 1, seed, cv=cv),
        ]
    except Exception as error:
        assume(reached("it is the drawn rate's fault", "no request arrives" not in str(error)))
        raise
    for trace in drawn:
        assert in_order(trace)
    assert all(arrival.at_s % 5 <= 3 + 1e-6 or arrival.at_s % 5 > 5 - 1e-6 for arrival in drawn[1])


@given(latencies_ms)
def test_percentiles_grow_and_were_measured(values: list[float]) -> None:
    found = percentiles(np.array(values))
    assert found is not None
    assert list(found) == sorted(found)
    assert set(found) <= set(values)
    assert sum(value <= found.p99 for value in values) >= 0.99 * len(values)


@st.composite
def answers(draw: st.DrawFn) -> LoadAnswer:
    gaps_s = draw(st.lists(st.floats(0, 100), max_size=5))
    status = draw(st.sampled_from(RequestEnd)) if gaps_s else RequestEnd.BROKEN
    token_at_s = tuple(np.cumsum(gaps_s).tolist())
    return LoadAnswer(
        index=0, due_s=0.0, sent_s=0.0, ended_s=1e3, input_tokens=1, token_at_s=token_at_s, status=status
    )


limits_ms = st.floats(1, 1e5)


@given(
    st.lists(answers(), min_size=1, max_size=30),
    st.builds(LatencyLimits, limits_ms, limits_ms),
    st.floats(0.1, 5),
    st.floats(0, 5),
)
def test_attainment_grows_with_the_scale(
    given_answers: list[LoadAnswer], reference: LatencyLimits, scale: float, more: float
) -> None:
    one = attainment(given_answers, reference, scale)
    other = attainment(given_answers, reference, scale + more)
    for tight, loose in zip(one, other, strict=True):
        assert (tight is None) == (loose is None)
        if reached("a share of the answers", tight is not None):
            assert tight is not None
            assert loose is not None
            assert 0 <= tight <= loose <= 1
    failed = sum(answer.status is not RequestEnd.OK for answer in given_answers)
    reached("answers fail", failed)
    assert one.ttft is not None
    assert one.ttft <= (len(given_answers) - failed) / len(given_answers)


@given(st.integers(0, 2**32), st.integers(4, 12), st.integers(50, 300), st.floats(0.5, 20))
def test_the_interval_holds_the_point_estimate(seed: int, units: int, size: int, factor: float) -> None:
    rng = np.random.default_rng(seed)
    sides = [[rng.exponential(scale, size) for _ in range(units)] for scale in (factor, 1.0)]
    found = change(clusters(sides[0]), clusters(sides[1]), rng)
    assert found is not None
    assert found.ratio is not None
    assert found.ratio_ci is not None
    width_ms = found.difference_ci_ms.high - found.difference_ci_ms.low
    assert found.difference_ci_ms.low - 0.1 * width_ms <= found.difference_ms
    assert found.difference_ms <= found.difference_ci_ms.high + 0.1 * width_ms
    assert found.ratio_ci.low * 0.9 <= found.ratio <= found.ratio_ci.high * 1.1


@given(st.lists(latencies_ms.map(np.array), min_size=1, max_size=8), st.integers(0, 2**32))
def test_resampled_p99s_are_the_resamples_p99s(units: list[np.ndarray], seed: int) -> None:
    drawn = resampled(clusters(units), np.random.default_rng(seed), draws=20)
    chances = np.full(len(units), 1 / len(units))
    times = np.random.default_rng(seed).multinomial(len(units), chances, size=20)
    for found, counts in zip(drawn, times, strict=True):
        resample = [unit for unit, count in zip(units, counts, strict=True) for _ in range(count)]
        assert found == percentile(clusters(resample))


@given(st.floats(0.01, 1e6), st.floats(1.1, 1e4), st.integers(2, 12))
def test_ticks_are_few_and_on_the_scale(low: float, factor: float, most: int) -> None:
    high = low * factor
    for found in (ticks(0, high, most), log_ticks(low, high, most)):
        assert found == sorted(found)
    assert 1 <= len(ticks(0, high, most)) <= most + 2
    scale = Scale(low=low, high=high, start=100, end=0, log=True)
    assert all(-1e-6 <= scale(tick) <= 100 + 1e-6 for tick in scale.ticks(most))


def test_a_draw_in_which_both_sides_failed_counts_as_failed_with_rows() -> None:
    """It is no draw without a value: the interval would be of the better draws alone."""

    def of_requests(num: int, failed: int) -> Clusters:
        return clusters([np.array([inf if n < failed else 1.0 + n / num]) for n in range(num)])

    found = change(of_requests(699, 3), of_requests(999, 9), np.random.default_rng(0))
    assert found is not None
    assert found.ratio_ci is not None
    assert found.ratio_ci[1] == found.difference_ci_ms[1] == inf
