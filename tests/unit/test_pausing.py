"""Rows pause for a promise that they break, and for none that live requests break themselves."""

from collections.abc import Callable
from random import Random

import pytest

from conserve.engine.policy.promises import LATENCIES, Promises
from conserve.engine.runtime.accountant import Account
from conserve.engine.runtime.class_traffic import WINDOW_S
from conserve.engine.runtime.pausing import KEPT, LONGEST_S, Pausing, RowsTime
from conserve.engine.runtime.traffic import Pause, Traffic

P99_MS = 100.0
IN_TIME, LATE = P99_MS / 2, P99_MS + 10
OF_ROWS = 20.0  # ms of a late latency that would be in time without them


class Played:
    """First tokens of a server, one a second."""

    def __init__(self) -> None:
        self.account = Account({"p99": P99_MS})
        self.now = 0.0
        self.tokens = self.late = self.paused = self.pauses = 0

    def play(self, tokens: int, late: Callable[[int], bool], *, rows_ms: float = OF_ROWS) -> None:
        """Answer so many requests, of which these are late beside rows, and none in pauses."""
        for number in range(tokens):
            on = self.account.pausing.on(now=self.now)
            is_late = late(number) and not on
            self.account.bound_ms(1)
            self.now += 1.0
            self.account.note(LATE if is_late else IN_TIME, rows_ms=0.0 if on else rows_ms, at=self.now)
            self.tokens += 1
            self.paused += on
            self.late += is_late
            self.pauses += self.account.pausing.on(now=self.now) and not on


def each(th: int) -> Callable[[int], bool]:
    """True for each `th` request."""
    return lambda number: number % th == th - 1


def test_a_promise_that_rows_break_is_kept() -> None:
    played = Played()
    played.play(20_000, each(3))
    assert played.pauses > 10, "rows get their turns again"
    assert 0.005 < played.late / played.tokens < 0.0115
    assert 0.9 < played.paused / played.tokens < 1.0


def test_as_many_late_as_the_promise_allows_pause_nothing() -> None:
    played = Played()
    played.play(20_000, each(120))
    assert (played.paused, played.late) == (0, 20_000 // 120)


def test_the_more_are_late_beside_rows_the_longer_these_pause() -> None:
    paused = []
    for th in (90, 60, 30, 10, 3):
        played = Played()
        played.play(20_000, each(th))
        paused.append(played.paused)
        assert played.late / played.tokens < 0.0115
    assert paused == sorted(paused)
    assert 0 < paused[0] < 0.4 * 20_000


@pytest.mark.parametrize("rows_ms", [0.0, LATE - P99_MS - 1])
def test_what_is_late_without_the_rows_too_pauses_nothing(rows_ms: float) -> None:
    played = Played()
    played.play(2_000, each(3), rows_ms=rows_ms)
    assert played.account.broken, "a tenth is all that rows add"
    assert played.paused == 0


def test_late_latencies_of_the_pause_do_not_make_it_longer() -> None:
    pausing = Pausing({"p99": P99_MS}, P99_MS)
    for _ in range(4):
        pausing.note(LATE, 1, 1, rows_ms=OF_ROWS, at=0.0)
    kept = 0
    while pausing.on(now=1.0):
        pausing.note(LATE, 1, 1, rows_ms=0.0, at=1.0)
        pausing.note(IN_TIME, 1, 1, rows_ms=0.0, at=1.0)
        kept += 1
    assert kept == pytest.approx(4 / 0.009, abs=8)


def test_a_pause_ends_after_minutes_whatever_is_owed() -> None:
    """Rows in flight have an hour for their answers."""
    pausing = Pausing({"p99": P99_MS}, P99_MS)
    for _ in range(4):
        pausing.note(LATE, 1, 1, rows_ms=OF_ROWS, at=0.0)
    pausing.note(IN_TIME, 1, 1, rows_ms=0.0, at=LONGEST_S - 1)
    assert pausing.on(now=LONGEST_S - 1)
    pausing.note(IN_TIME, 1, 1, rows_ms=0.0, at=LONGEST_S)
    assert not pausing.on(now=LONGEST_S)
    pausing.note(LATE, 1, 1, rows_ms=OF_ROWS, at=LONGEST_S + 1)
    assert not pausing.on(now=LONGEST_S + 1), "nothing is owed from before"


@pytest.mark.parametrize("late_ms", [None, LATE])
def test_a_pause_ends_by_the_clock_where_no_latency_says_anything(late_ms: float | None) -> None:
    """Live requests may get one token each, or be late by themselves for hours."""
    pausing = Pausing({"p99": P99_MS}, P99_MS)
    for _ in range(4):
        pausing.note(LATE, 1, 1, rows_ms=OF_ROWS, at=5.0)
    ends = 5.0 + LONGEST_S
    assert pausing.on(now=ends - 0.1)
    assert not pausing.on(now=ends)
    if late_ms is not None:
        pausing.note(late_ms, 1, 1, rows_ms=0.0, at=ends)
    for number in range(3):
        pausing.note(LATE, 1, 1, rows_ms=OF_ROWS, at=ends + number)
        assert not pausing.on(now=ends + number), "nothing is owed from before"
    pausing.note(LATE, 1, 1, rows_ms=OF_ROWS, at=ends + 4)
    assert pausing.on(now=ends + 4)


def test_rows_that_add_a_tenth_are_tried_first() -> None:
    account = Account({"p99": P99_MS})
    for _ in range(2):
        for _ in range(4):
            assert not account.pausing.on(now=0.0)
            account.note(LATE, rows_ms=OF_ROWS)
        assert account.broken
    assert account.pausing.on(now=0.0)


@pytest.mark.parametrize("named", [{}, {"mean": P99_MS}])
def test_without_a_promise_of_a_quantile_rows_do_not_pause(named: dict[str, float]) -> None:
    account = Account(named)
    for number in range(1000):
        account.note(LATE, rows_ms=LATE, at=float(number))
    assert not account.pausing.on(now=0.0)


def test_latencies_are_held_against_the_bound_in_the_engine() -> None:
    account = Account({"p99": P99_MS})
    account.tighten_by({"p99": 10.0})
    for number in range(20):
        account.note(P99_MS - 5.0, rows_ms=OF_ROWS, at=float(number))
    assert account.pausing.on(now=0.0)


class TestRowsTime:
    """The time of rows between two moments."""

    def test_it_is_spread_evenly_over_an_iteration(self) -> None:
        rows = RowsTime()
        rows.note(10.0, 12.0, 1.0)
        rows.note(12.0, 13.0, 1.0)
        rows.note(20.0, 24.0, 1.0)
        for begin, end, seconds in (
            (0.0, 5.0, 0.0),
            (0.0, 30.0, 3.0),
            (10.0, 12.0, 1.0),
            (11.0, 12.0, 0.5),
            (11.0, 12.5, 1.0),
            (13.0, 20.0, 0.0),
            (12.5, 21.0, 0.75),
            (22.0, 23.0, 0.25),
            (24.0, 25.0, 0.0),
        ):
            assert rows.between(begin, end) == pytest.approx(seconds), (begin, end)

    def test_iterations_without_rows_take_none(self) -> None:
        rows = RowsTime()
        rows.note(0.0, 1.0, 0.0)
        rows.note(1.0, 1.0, 0.5)
        assert rows.between(0.0, 2.0) == 0.0

    def test_the_newest_iterations_are_kept(self) -> None:
        rows, dice, ran, now = RowsTime(), Random(1), [], 0.0
        for _ in range(5 * KEPT):
            start, end = now + dice.random(), now + 1 + dice.random()
            ran.append((start, end, dice.random() * (end - start)))
            rows.note(*ran[-1])
            now = end
        assert len(rows._ends) < 2 * KEPT
        for _ in range(50):
            place = dice.randrange(len(ran) - KEPT, len(ran))
            whole = sum(seconds for _, _, seconds in ran[place:])
            assert rows.between(ran[place][0], now) == pytest.approx(whole)
            assert rows.between(ran[place][0], ran[place][1]) == pytest.approx(ran[place][2])


def late(traffic: Traffic, requests: int, *, live_class: str | None = None) -> None:
    """Requests that arrive each second in an iteration of rows, and have their tokens late for that."""
    for number in range(requests):
        at = float(number)
        traffic.bounds(now=at)
        traffic.arrived(str(number), 10, at=at, live_class=live_class)
        traffic.rows_time.note(at, at + 0.1, 0.1)
        traffic.tokens([str(number)], at=at + 0.15)
        traffic.rows_time.note(at + 0.15, at + 0.25, 0.1)
        traffic.tokens([str(number)], at=at + 0.3)
        traffic.finished(str(number))


def broken() -> Traffic:
    """Live traffic whose first tokens are late because of rows."""
    traffic = Traffic(Promises.of({"ttft_ms": P99_MS}))
    late(traffic, 20)
    return traffic


def test_rows_pause_while_live_requests_are_there_or_expected() -> None:
    traffic = broken()
    assert traffic.pauses(offline=True, promises=True, now=20.0)
    assert not traffic.pauses(offline=True, promises=False, now=20.0), "of a policy that keeps none"
    assert traffic.report(now=20.0)["online"]["paused_for"] == ["ttft_ms"]
    assert traffic.report(now=20.0, holds_back=False)["online"]["paused_for"] == []
    assert not traffic.pauses(offline=True, promises=True, now=20.0 + WINDOW_S)
    assert traffic.report(now=20.0 + WINDOW_S)["online"]["paused_for"] == []
    traffic.arrived("next", 10, at=21.0 + WINDOW_S)
    assert traffic.pauses(offline=True, promises=True, now=21.0 + WINDOW_S)


@pytest.mark.parametrize("latency", LATENCIES)
def test_a_stream_alone_pauses_rows_for_its_tokens_and_not_for_arrivals(latency: str) -> None:
    traffic = Traffic(Promises.of({latency: P99_MS}))
    late(traffic, 20)
    traffic.arrived("long", 10, at=20.0)
    traffic.tokens(["long"], at=20.01)
    traffic.tokens(["long"], at=20.02)
    pauses = traffic.pauses(offline=True, promises=True, now=21.0 + WINDOW_S)
    assert pauses is (Pause.PROMISE if latency == "tbt_ms" else None)
    traffic.arrived("next", 10, at=21.0 + WINDOW_S)
    assert traffic.pauses(offline=True, promises=True, now=21.0 + WINDOW_S) is Pause.PROMISE


def test_a_request_with_a_promise_of_its_own_is_not_held_against_that_of_others() -> None:
    traffic = Traffic(Promises.of({"ttft_ms": P99_MS}))
    for number in range(40):
        name, at, own = str(number), float(number), number % 2 == 1
        traffic.arrived(name, 10, at=at, own_ttft=own)
        if number % 4 == 1:
            traffic.finished(name, aborted_at=at + 30.0)
        traffic.tokens([name], at=at + (LATE if own else IN_TIME) / 1e3)
        traffic.finished(name)
    online = traffic.report(now=40.0)["online"]
    assert (online["held_back"], online["paused_for"]) == ([], [])
    assert online["counts"]["ttft_ms"] == {"all": 20, "late": 0}, (
        "any client could raise the alerts on late ones"
    )
    assert online["attainment"] == 1.0
    assert online["promises"]["ttft_ms"]["p99"] == {
        "promised_ms": P99_MS,
        "seen_ms": pytest.approx(IN_TIME),
        "kept": True,
    }
    assert online["ttft_ms"]["p99"] == pytest.approx(30_000.0), "it is a latency as others are"
    assert sum(online["histograms"]["ttft_ms"]["counts"]) == 40
    late(traffic, 6)
    assert traffic.report(now=40.0)["online"]["held_back"] == ["ttft_ms"], "names come again"


def test_a_policy_answers_for_its_own_rows() -> None:
    """A benchmark plays several policies under the same promises."""
    traffic = Traffic(Promises.of({"ttft_ms": P99_MS}))
    traffic.use_policy("sarathi++")
    late(traffic, 20)
    assert traffic.report(now=20.0)["online"]["held_back"] == ["ttft_ms"]
    traffic.use_policy("conserve")
    assert traffic.pauses(offline=True, promises=True, now=20.0) is None
    assert traffic.report(now=20.0)["online"]["held_back"] == []
    traffic.use_policy("sarathi++")
    assert traffic.report(now=20.0)["online"]["held_back"] == ["ttft_ms"], "its accounts go on"


def test_a_class_that_none_uses_pauses_nothing() -> None:
    traffic = Traffic(Promises.of({"ttft_ms": P99_MS}), classes={"agents": Promises.of({"ttft_ms": P99_MS})})
    late(traffic, 20, live_class="agents")
    report = traffic.report(now=20.0)
    assert report["online"]["paused_for"] == report["classes"]["agents"]["paused_for"] == ["ttft_ms"]
    assert report["classes"]["default"]["paused_for"] == []
    traffic.arrived("other", 10, at=19.0 + WINDOW_S + 1)
    assert not traffic.pauses(offline=True, promises=True, now=19.0 + WINDOW_S + 1)


def test_promises_that_come_back_go_on_with_their_accounts() -> None:
    """A benchmark alternates them; a server's accounts are not those of its first seconds."""
    traffic, other = broken(), Promises.of({"harm": 0.1})
    same = Promises.of(traffic.promises.document())
    traffic.promise(other)
    assert not traffic.pauses(offline=True, promises=True, now=20.0)
    traffic.promise(same)
    assert traffic.pauses(offline=True, promises=True, now=20.0)
    traffic.promise(Promises.of({"ttft_ms": P99_MS + 1}))
    assert not traffic.pauses(offline=True, promises=True, now=20.0)


@pytest.mark.parametrize("latency", LATENCIES)
def test_both_latencies_pause_rows(latency: str) -> None:
    traffic = Traffic(Promises.of({latency: P99_MS}))
    late(traffic, 20)
    assert traffic.report(now=20.0)["online"]["paused_for"] == [latency]


def test_clients_that_leave_because_of_rows_pause_them() -> None:
    traffic = Traffic(Promises.of({"ttft_ms": P99_MS}))
    for number in range(20):
        traffic.arrived(str(number), 10, at=float(number))
        traffic.rows_time.note(number + 0.01, number + 0.15, 0.14)
        traffic.finished(str(number), aborted_at=number + 0.15)
    assert traffic.pauses(offline=True, promises=True, now=20.0)


def test_a_burst_that_waits_for_itself_pauses_nothing() -> None:
    traffic = Traffic(Promises.of({"ttft_ms": P99_MS}))
    traffic.rows_time.note(0.0, 0.02, 0.02)
    for number in range(500):
        traffic.arrived(str(number), 10, at=0.0)
    for number in range(500):
        traffic.bounds(now=0.02 * number)
        traffic.tokens([str(number)], at=0.02 * (number + 2))
    assert traffic.report(now=11.0)["online"]["held_back"] == ["ttft_ms"]
    assert traffic.report(now=11.0)["online"]["paused_for"] == []
