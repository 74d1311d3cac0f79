"""Number of rows that a server bears: additive increase, multiplicative decrease, and signs of other requests."""

import random
from math import exp, inf
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.endpoints.window import (
    ALONE_S,
    AT_FEW,
    FEW_ROWS,
    FIRST,
    HELD,
    LONGEST_ALONE_S,
    PATIENCE,
    SLOWER,
    SMALL_FOR,
    SOON,
    CalmLatency,
    CongestionWindow,
    OtherRequests,
    Ours,
    ServerMetrics,
)

PAGE = """\
# HELP vllm:num_requests_waiting Number of requests waiting.
vllm:num_requests_running{engine="0"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{reason="capacity"} 7.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 10.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 5.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 3.0
vllm:request_success_total{engine="0",finished_reason="error",model_name="m"} 1.0
process_start_time_seconds 1.78e+09
"""
CALM_S = 0.1


class BusyServer:
    """A server whose small requests take longer with each row, and differ at random; rows take `row_s`."""

    def __init__(self, *, row_s: float, spread: float, rows_at_ease: float = inf) -> None:
        self.row_s, self.spread, self.rows_at_ease = row_s, spread, rows_at_ease
        self.window, self.random = CongestionWindow(high=64), random.Random(0)
        self.rows = 0.0
        self.calm_s = CALM_S

    @property
    def slowdown(self) -> float:
        """Times the calm latency that requests of others take beside the rows."""
        return 1 + (self.rows / self.rows_at_ease) ** 2

    def look(self) -> None:
        """Let a second go by: rows come up to the window, and end at their own pace."""
        ended = self.rows * (1 - 1 / max(1.0, self.row_s))
        self.rows = max(self.window.size, ended)
        took_s = self.calm_s * self.slowdown * exp(self.random.gauss(0, self.spread))
        self.window.observe("chat", took_s, rows=round(self.rows))

    def mean(self, looks: int) -> tuple[float, float]:
        """Mean rows and slowdown of so many looks."""
        seen = []
        for _ in range(looks):
            self.look()
            seen.append((self.rows, self.slowdown))
        return fmean(rows for rows, _ in seen), fmean(slowdown for _, slowdown in seen)


@pytest.mark.parametrize("row_s", [0.5, 5.0, 30.0])
@pytest.mark.parametrize("spread", [0.0, 0.1, 0.3])
def test_a_server_that_rows_do_not_slow_gets_all_of_them(row_s: float, spread: float) -> None:
    """Latencies that differ by chance are no pressure, however long rows take."""
    server = BusyServer(row_s=row_s, spread=spread)
    server.mean(300)
    rows, _ = server.mean(3000)
    assert rows > 60


@pytest.mark.parametrize("row_s", [0.5, 5.0, 30.0])
@pytest.mark.parametrize("spread", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("rows_at_ease", [8, 24])
def test_rows_slow_others_by_what_is_borne(row_s: float, spread: float, rows_at_ease: float) -> None:
    server = BusyServer(row_s=row_s, spread=spread, rows_at_ease=rows_at_ease)
    server.mean(300)
    rows, slowdown = server.mean(3000)
    assert rows > rows_at_ease / 3
    assert slowdown < 1.4 * SLOWER


@pytest.mark.parametrize("row_s", [0.5, 5.0, 30.0])
def test_longer_prompts_than_those_of_the_start_are_no_pressure_for_ever(row_s: float) -> None:
    """Small requests take three times as long from some moment on: the window closes, and opens again."""
    server = BusyServer(row_s=row_s, spread=0.1)
    server.mean(300)
    server.calm_s = 3 * CALM_S
    sizes = []
    for _ in range(SMALL_FOR + HELD):
        server.look()
        sizes.append(server.window.size)
    assert min(sizes) < 16
    assert server.mean(100)[0] > 60


def test_rows_make_no_room_for_themselves() -> None:
    """Latency that rows cause never tells the calm one, however long it lasts."""
    server = BusyServer(row_s=5.0, spread=0.1, rows_at_ease=8)
    early, _ = server.mean(2000)
    server.mean(50_000)
    late, _ = server.mean(2000)
    assert late < 1.2 * early


@given(
    looks=st.lists(st.tuples(st.floats(1e-9, 1e9) | st.just(inf), st.sampled_from("mpf")), max_size=200),
    high=st.integers(1, 100),
)
def test_a_window_never_leaves_its_bounds(looks: list[tuple[float, str]], high: int) -> None:
    window = CongestionWindow(high=high)
    for number, how in looks:
        if how == "m":
            window.observe("chat", number, rows=window.size)
        elif how == "p":
            window.press()
        else:
            window.fill(rows=window.size, queued=number)
        assert 1 <= window.size <= high


def test_a_calm_reading_adds_a_row_and_a_refusal_halves() -> None:
    window = CongestionWindow(high=32)
    assert [window.observe("chat", CALM_S, rows=1) for _ in range(4)] == [2, 3, 4, 5]
    assert [window.press(), window.press(), window.press()] == [2, 1, 1]


def test_one_slow_answer_is_no_pressure() -> None:
    window = CongestionWindow(high=32)
    for n in range(40):
        window.observe("chat", 100 * CALM_S if n == 20 else CALM_S, rows=window.size)
    assert window.size == 32


def test_a_window_is_cut_once_for_readings_of_its_size() -> None:
    """Readings of before the cut are among the latest for some time."""
    window = CongestionWindow(high=64)
    for _ in range(70):
        window.observe("chat", CALM_S, rows=window.size)
    sizes = [window.observe("chat", 3 * CALM_S, rows=window.size) for _ in range(2 * FIRST + 1)]
    assert sizes == [64] * 4 + [48] * 6 + [24]  # half of the latest ten are slow, then all


def test_each_kind_of_request_has_a_calm_latency_of_its_own() -> None:
    window = CongestionWindow(high=64)
    for kind, took_s in (("chat", CALM_S), ("embeddings", 9 * CALM_S)):
        for _ in range(40):
            window.observe(kind, took_s, rows=window.size)
    assert window.size == 64


def test_a_server_in_trouble_is_under_pressure_at_once_and_that_is_no_scale() -> None:
    window = CongestionWindow(high=64)
    for _ in range(70):
        window.observe("chat", CALM_S, rows=window.size)
    assert [window.observe("chat", inf, rows=window.size) for _ in range(3)] == [32, 16, 8]
    for _ in range(400):
        window.observe("chat", CALM_S, rows=window.size)
    assert window.size == 64


def test_a_slow_reading_adds_no_row() -> None:
    window = CongestionWindow(high=64)
    for _ in range(9):
        window.observe("chat", CALM_S, rows=window.size)
    assert [window.observe("chat", took_s, rows=window.size) for took_s in (9 * CALM_S, CALM_S)] == [10, 11]


def test_a_small_request_tells_enough_after_some_time() -> None:
    window = CongestionWindow(high=64)
    assert window.patience_s("chat") == inf
    for _ in range(FIRST):
        window.observe("chat", CALM_S, rows=1)
    assert window.patience_s("chat") == pytest.approx(PATIENCE * SLOWER * CALM_S)


def test_the_calm_latency_falls_with_many_lower_readings_beside_any_rows() -> None:
    latency = CalmLatency()
    for _ in range(100):
        latency.observe(1.0, rows=9)
    for _ in range(100):
        latency.observe(0.1, rows=9)
    assert latency.observe(0.1, rows=9) == pytest.approx(1 / SLOWER)
    for _ in range(AT_FEW):
        latency.observe(1.0, rows=FEW_ROWS)
    assert latency.observe(1.0, rows=9) == pytest.approx(1 / SLOWER)
    for _ in range(100):
        latency.observe(0.1, rows=9)
    assert latency.observe(0.1, rows=9) == pytest.approx(1 / SLOWER), "and again, as at night"


def test_a_server_without_others_is_filled_to_its_places() -> None:
    window = CongestionWindow(high=64)
    assert [window.fill(rows=0, queued=0) for _ in range(7)] == [2, 4, 8, 16, 32, 64, 64]
    sizes = [window.fill(rows=window.size, queued=max(0, window.size - 16)) for _ in range(20)]
    assert {*sizes} == {16, 17}, "the engine runs 16 at a time, and no queue stands before a next request"


def test_a_window_starts_over_with_one_row_and_its_scales() -> None:
    window = CongestionWindow(high=64)
    for _ in range(70):
        window.observe("chat", CALM_S, rows=window.size)
    window.start_over()
    assert (window.size, window.patience_s("chat")) == (1, pytest.approx(PATIENCE * SLOWER * CALM_S))


def test_a_reading_beside_no_others_moves_nothing() -> None:
    window = CongestionWindow(high=64)
    for took_s in [CALM_S] * 20 + [9 * CALM_S] * 20:
        assert window.observe("chat", took_s, rows=1, moves=False) == 1


def test_a_page_of_metrics_is_summed_over_engines() -> None:
    assert ServerMetrics.read(PAGE) == ServerMetrics(4.0, 3.0, 15.0, started_at=1.78e9)
    assert ServerMetrics.read("process_cpu_seconds_total 1.0\n") is None


def looks(
    others: OtherRequests, seconds: int, *, rows: int = 8, begin: int = 0, theirs: int = 0, elsewhere: int = 0
) -> list[bool]:
    """Whether others may be there, second by second: our `rows` are answered each second, and `theirs` too.

    `elsewhere` are answers of ours each second that the page does not count.
    """
    seen = []
    for second in range(begin, begin + seconds):
        ours = Ours(in_flight=rows, answered=rows * second)
        page = ServerMetrics(rows, 0, (rows - elsewhere + theirs) * second + 1000)
        seen.append(others.observe(page, ours, ours, now=float(second)))
    return seen


def test_others_may_be_there_until_none_was_seen_for_long() -> None:
    others = OtherRequests()
    assert looks(others, 70) == [second < ALONE_S for second in range(70)]
    for more in (ServerMetrics(9, 0, 1000 + 8 * 70), ServerMetrics(8, 1, 1000 + 8 * 70)):
        ours = Ours(8, 8 * 70)
        assert others.observe(more, ours, ours, now=70.0), "one request more than ours runs, or waits"


def test_others_that_come_back_soon_are_waited_for_twice_as_long() -> None:
    """As a user's requests every 90 s."""
    others, waited_s, second = OtherRequests(), list[int](), 0
    for _ in range(8):
        seen = looks(others, 3000, begin=second)
        waited_s.append(seen.index(False))
        second += waited_s[-1] + 1
        ours = Ours(8, 8 * second)
        assert others.observe(ServerMetrics(9, 0, 1000 + 8 * second), ours, ours, now=float(second))
        second += 1
    assert waited_s[0] == ALONE_S
    assert waited_s[1:4] == [2 * ALONE_S - 1, 4 * ALONE_S - 1, 8 * ALONE_S - 1]
    assert waited_s[-1] == LONGEST_ALONE_S - 1
    looks(others, int(LONGEST_ALONE_S * (SOON + 2)), begin=second)
    second += int(LONGEST_ALONE_S * (SOON + 2))
    ours = Ours(8, 8 * second)
    assert others.observe(ServerMetrics(9, 0, 1000 + 8 * second), ours, ours, now=float(second))
    assert looks(others, 100, begin=second + 1).index(False) == ALONE_S - 1, "after a night it is forgotten"


def test_a_row_that_was_sent_or_answered_meanwhile_is_ours() -> None:
    others = OtherRequests()
    looks(others, 70)
    page = ServerMetrics(9, 0, 1000 + 8 * 70 + 1)
    before, after = Ours(9, 8 * 70), Ours(8, 8 * 70 + 1)
    assert not others.observe(page, before, after, now=70.0)


def test_answers_that_all_come_at_once_are_ours_as_well() -> None:
    """The server counts 64 in one iteration, and the client reads them one after the other."""
    others = OtherRequests()
    looks(others, 70, rows=64)
    for second in range(70, 100):
        finished, late = 64 * (second // 10) * 10, 40 if second % 10 == 0 else 0
        ours = Ours(64, finished - late)
        page = ServerMetrics(64, 0, 1000 + finished)
        assert not others.observe(page, ours, ours, now=float(second))


def test_short_requests_of_others_are_seen_by_their_answers() -> None:
    """Requests that no look finds at the server."""
    assert all(looks(OtherRequests(), 300, theirs=1))


def test_figures_that_lack_answers_of_ours_tell_of_no_server_without_others() -> None:
    """Of one replica behind a balancer, which sends rows elsewhere."""
    assert all(looks(OtherRequests(), 300, elsewhere=4))


def test_figures_that_lack_rows_of_ours_tell_of_no_server_without_others() -> None:
    """Of one replica behind a balancer, whose rows take long."""
    others, ours = OtherRequests(), Ours(64, 0)
    assert all(others.observe(ServerMetrics(32, 0, 1000), ours, ours, now=float(now)) for now in range(300))


def test_figures_of_another_process_tell_nothing_of_the_first() -> None:
    others = OtherRequests()
    looks(others, 70)
    ours = Ours(8, 8 * 70)
    assert others.observe(ServerMetrics(8, 0, 1000 + 8 * 70, started_at=2.0), ours, ours, now=70.0)


@pytest.mark.parametrize("gap_s", [1, ALONE_S + 1], ids=["told", "by the clock"])
def test_others_may_have_come_while_nobody_looked(gap_s: float) -> None:
    others = OtherRequests()
    assert not looks(others, 70)[-1]
    if gap_s == 1:
        others.forget()
    ours = Ours(8, 8 * 70)
    assert others.observe(ServerMetrics(8, 0, 1000 + 8 * 70), ours, ours, now=69 + gap_s)
