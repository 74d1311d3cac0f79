"""Number of rows that a server bears: additive increase, multiplicative decrease, and signs of pressure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.endpoints.window import (
    CALM_AGAIN,
    FALLS_APART,
    MOST_REPLICAS,
    CongestionWindow,
    MetricsPressure,
    ServerMetrics,
    SlownessWindow,
)

LOOKS = st.lists(st.booleans(), max_size=200)
PAGE = """\
# HELP vllm:num_requests_waiting Number of requests waiting.
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{reason="capacity"} 7.0
vllm:time_to_first_token_seconds_count{engine="0"} 10.0
vllm:time_to_first_token_seconds_sum{engine="0"} 2.5e+00
process_start_time_seconds 1.78e+09
"""


@given(looks=LOOKS, high=st.integers(1, 100))
def test_a_window_never_leaves_its_bounds(looks: list[bool], high: int) -> None:
    window = CongestionWindow(high=high)
    for pressed in looks:
        assert 1 <= window.observe(pressed) <= high


@given(looks=LOOKS, high=st.integers(1, 100))
def test_calm_adds_one_and_pressure_halves(looks: list[bool], high: int) -> None:
    window = CongestionWindow(high=high)
    for pressed in looks:
        before = window.size
        after = window.observe(pressed)
        assert after == (max(1, before // 2) if pressed else min(high, before + 1))


@given(looks=LOOKS)
def test_a_calm_server_gets_the_whole_window_again(looks: list[bool]) -> None:
    window = CongestionWindow(high=32)
    for pressed in looks:
        window.observe(pressed)
    for _ in range(31):
        window.observe(False)
    assert window.size == 32


def test_two_harvesters_on_one_server_end_with_equal_windows() -> None:
    first, second = CongestionWindow(high=1000), CongestionWindow(high=1000)
    first.size, second.size = 90, 2
    for _ in range(1000):
        pressed = first.size + second.size > 100
        first.observe(pressed)
        second.observe(pressed)
    assert abs(first.size - second.size) <= 2


def test_a_page_of_metrics_is_summed_over_engines() -> None:
    metrics = ServerMetrics.read(PAGE)
    assert metrics == ServerMetrics(waiting=3.0, first_tokens=10.0, first_token_s=2.5, started_at=1.78e9)
    assert ServerMetrics.read("process_cpu_seconds_total 1.0\n") is None


def test_requests_that_wait_are_pressure() -> None:
    pressure = MetricsPressure()
    assert not pressure.observe(ServerMetrics(0, 0, 0))
    assert pressure.observe(ServerMetrics(1, 0, 0))
    assert not pressure.observe(ServerMetrics(0, 0, 0))


def test_a_first_token_that_takes_longer_than_in_calm_is_pressure() -> None:
    pressure = MetricsPressure()
    count, seconds = 0.0, 0.0
    for _ in range(10):
        count, seconds = count + 10, seconds + 10 * 0.2
        assert not pressure.observe(ServerMetrics(0, count, seconds))
    looks = []
    for _ in range(5):
        count, seconds = count + 10, seconds + 10 * 0.4
        looks.append(pressure.observe(ServerMetrics(0, count, seconds)))
    assert looks == [False, False, True, True, True]
    assert not pressure.observe(ServerMetrics(0, count, seconds)), (
        "no row got a first token: nothing is known"
    )


def sizes_behind_a_balancer(pressure: MetricsPressure, *, told: bool, rows_at_ease: float) -> list[int]:
    """Sizes of a window whose readings come from two replicas in turn; first tokens wait for rows beyond some."""
    window, sizes = CongestionWindow(high=64), list[int]()
    counts, seconds = [100_000.0, 90_000.0], [1_000.0, 50_000.0]
    for look in range(200):
        for at in range(2):
            counts[at] += 10
            seconds[at] += 10 * 0.1 * max(1.0, window.size / rows_at_ease)
        at = look % 2
        metrics = ServerMetrics(0, counts[at], seconds[at], started_at=1e9 + at if told else None)
        sizes.append(window.observe(pressure.observe(metrics, rows=window.size)))
    return sizes


@pytest.mark.parametrize(("rows_at_ease", "most"), [(1000, 64), (8, 20)])
def test_replicas_behind_a_balancer_are_judged_apart(rows_at_ease: float, most: int) -> None:
    """Calm ones get the whole window, and busy ones are spared."""
    pressure = MetricsPressure()
    sizes = sizes_behind_a_balancer(pressure, told=True, rows_at_ease=rows_at_ease)
    assert most / 2 < max(sizes[50:]) <= most
    assert not pressure.mixed


def test_replicas_that_look_alike_are_found_out_and_one_that_restarts_is_none() -> None:
    alike = MetricsPressure()
    sizes_behind_a_balancer(alike, told=False, rows_at_ease=1000)
    assert alike.mixed
    restarted = MetricsPressure()
    for _ in range(3):
        for count in range(1, FALLS_APART + 1):
            assert not restarted.observe(ServerMetrics(0, count, count * 0.2))
    assert not restarted.mixed


def test_only_a_limited_number_of_replicas_is_remembered() -> None:
    """Pods that come and go for months."""
    pressure = MetricsPressure()
    for start in range(MOST_REPLICAS + 10):
        pressure.observe(ServerMetrics(0, 0, 0, started_at=start))
    assert len(pressure._replicas) == MOST_REPLICAS


@given(latencies=st.lists(st.floats(0.1, 0.149), max_size=50))
def test_small_changes_are_no_pressure(latencies: list[float]) -> None:
    judged = SlownessWindow()
    assert not any(judged.observe(latency) for latency in latencies)


@pytest.mark.parametrize("row_s", [0.5, 5.0])
def test_longer_prompts_than_those_of_the_start_are_no_pressure_for_ever(row_s: float) -> None:
    """Rows whose first token takes twice as long, and no live request: the window opens again."""
    pressure, window = MetricsPressure(), CongestionWindow(high=64)
    count, seconds, due, sizes = 0.0, 0.0, 0.0, list[int]()
    for ttft_s, looks in ((0.05, 300), (0.1, 3000)):
        for _ in range(looks):
            due += window.size / row_s
            count, seconds, due = count + int(due), seconds + int(due) * ttft_s, due % 1
            metrics = ServerMetrics(0, count, seconds)
            sizes.append(window.observe(pressure.observe(metrics, rows=window.size)))
            if window.small_for >= CALM_AGAIN:
                window.small_for = 0
                pressure.rescale()
    assert min(sizes[300:]) <= 4
    assert sum(sizes[-100:]) / 100 > 32


def test_rows_make_no_room_for_themselves() -> None:
    """Latency that rows cause never sets the scale, however long it lasts."""
    judged, window, sizes = SlownessWindow(), CongestionWindow(high=64), list[int]()
    for _ in range(20_000):
        sizes.append(window.observe(judged.observe(0.1 + 0.01 * window.size, rows=window.size)))
        if window.small_for >= CALM_AGAIN:
            window.small_for = 0
            judged.rescale()
    assert max(sizes[-1000:]) <= max(sizes[100:1100]) + 1
    assert max(sizes) < 16


def test_a_window_is_small_below_a_quarter_of_its_largest_size() -> None:
    window = CongestionWindow(high=12)
    assert [(window.observe(pressed=False), window.small_for) for _ in range(3)] == [(2, 1), (3, 0), (4, 0)]
    assert [(window.observe(pressed=True), window.small_for) for _ in range(3)] == [(2, 1), (1, 2), (1, 3)]
    one = CongestionWindow(high=1)
    assert (one.observe(pressed=False), one.small_for) == (1, 1)


def test_one_slow_answer_is_no_pressure() -> None:
    judged = SlownessWindow()
    looks = [judged.observe(latency) for latency in [0.1] * 10 + [5.0] + [0.1] * 10]
    assert not any(looks)
