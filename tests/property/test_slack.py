"""Slack order: what earliest-deadline-first would keep is kept whichever rows ride along, others get a share."""

import random
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from conserve.jobs.deadlines.slack import (
    SHARE,
    SlackOrder,
    claim_order,
    is_others_turn,
    share_of_tokens,
    slack_order,
)
from conserve.jobs.deadlines.work import QueuedJob, RemainingWork
from conserve.jobs.window.waiting import WaitingRow, WaitingWindow
from tests.conftest import examples
from tests.property.test_prefix_tree import WORDS, chained
from tests.reach import reached


class Dated(NamedTuple):
    """A job of so many rows; its deadline leaves so many seconds more than earliest deadline first needs."""

    rows: int
    to_spare_s: int


DATED = st.lists(st.builds(Dated, st.integers(1, 30), st.integers(0, 400)), min_size=1, max_size=5)


def job(seq: int, rows: int, deadline: float | None = None, *, row_tokens: float = 1.0) -> QueuedJob:
    work = RemainingWork(rows_left=rows, row_tokens=row_tokens, rows_seen=0)
    return QueuedJob(id=f"job-{seq}", seq=seq, work=work, deadline=deadline)


def feasible(dated: list[Dated], rate: float) -> list[QueuedJob]:
    """Jobs whose deadlines earliest deadline first keeps at so many rows a second, the share of others left."""
    jobs: list[QueuedJob] = []
    due, deadline = 0, 0.0
    for seq, (rows, to_spare_s) in enumerate(dated, start=1):
        due += rows
        deadline = max(deadline, due / rate + len(dated) + to_spare_s)
        jobs.append(job(seq, rows, deadline))
    return jobs


@given(dated=DATED, undated=st.booleans(), seed=st.integers(0, 1000))
@hypothesis_settings(max_examples=examples(200))
def test_what_earliest_deadline_first_keeps_is_kept_whoever_rides(
    dated: list[Dated], undated: bool, seed: int
) -> None:
    """An adversary takes any row that may ride; a row takes a second."""
    dice, now, turn = random.Random(seed), 0.0, 0
    left = {one.seq: one for one in feasible(dated, 1 - SHARE if undated else 1.0)}
    while left:
        others = [job(99, 50)] if undated else []
        order = slack_order([*left.values(), *others], now=now, tokens_per_s=1.0)
        riders = [*sorted(order.riders), *([99] if undated and order.others_ride else [])]
        taken = 99 if undated and is_others_turn(turn, SHARE) else dice.choice(riders)
        reached("another job rides", taken != order.urgent[0])
        now, turn = now + 1.0, turn + 1
        if taken == 99:
            continue
        one = left.pop(taken)
        assert one.deadline is not None
        assert now <= one.deadline + 1.0, "a share comes in whole rows"
        if one.work.rows_left > 1:
            left[taken] = job(taken, one.work.rows_left - 1, one.deadline)


JOBS = st.lists(
    st.tuples(st.integers(1, 10_000), st.none() | st.integers(1, 100_000)), min_size=1, max_size=8
).map(lambda pairs: [job(seq, rows, deadline) for seq, (rows, deadline) in enumerate(pairs)])


@given(jobs=JOBS, now=st.integers(0, 1000), rate=st.floats(0.1, 1000.0), more=st.floats(1.0, 10.0))
@hypothesis_settings(max_examples=examples(200))
def test_riders_grow_with_slack(jobs: list[QueuedJob], now: int, rate: float, more: float) -> None:
    """A faster engine lets at least the same jobs ride; the first job always may run."""
    order = slack_order(jobs, now=now, tokens_per_s=rate)
    faster = slack_order(jobs, now=now, tokens_per_s=rate * more)
    deadlines = {one.seq: one.deadline for one in jobs if one.deadline is not None}
    assert list(order.urgent) == sorted(deadlines, key=lambda seq: (deadlines[seq], seq))
    assert order.riders == set(order.urgent[: len(order.riders)])
    assert order.riders <= faster.riders
    assert order.others_ride <= faster.others_ride
    assert not order.urgent or order.urgent[0] in order.riders
    assert not order.others_ride or order.riders == set(order.urgent)


@pytest.mark.parametrize(("left_s", "rides"), [(459.9, False), (460.0, True)])
def test_a_job_is_tight_below_four_times_its_work_and_a_minute(left_s: float, rides: bool) -> None:
    """A second job without a deadline takes a fifth of the rows: 8,000 tokens at 80 a second, 100 s."""
    now = 1_000_000.0
    jobs = [job(1, 80, now + left_s, row_tokens=100.0), job(2, 1, row_tokens=100.0)]
    assert slack_order(jobs, now=now, tokens_per_s=100.0).others_ride is rides


@pytest.mark.parametrize(("left_s", "rides"), [(1499.9, False), (1500.1, True)])
def test_long_rows_without_a_deadline_leave_less_to_the_others(left_s: float, rides: bool) -> None:
    """A fifth of the rows is nine tenths of the tokens where rows are 36 times as long."""
    now = 1_000_000.0
    jobs = [job(1, 360, now + left_s, row_tokens=10.0), job(2, 10, row_tokens=360.0)]
    assert share_of_tokens(SHARE, due=[(3600, 360)], kept=[(3600, 10)]) == pytest.approx(0.9)
    assert slack_order(jobs, now=now, tokens_per_s=100.0).others_ride is rides


def test_without_a_known_rate_no_row_goes_ahead() -> None:
    jobs = [job(n, 1, n * 1e9) for n in (1, 2)]
    order = slack_order(jobs, now=0.0, tokens_per_s=None)
    assert (order.urgent, order.riders, order.others_ride) == ((1, 2), {1}, False)


@given(share=st.floats(0.01, 0.99), start=st.integers(0, 10_000), turns=st.integers(1, 500))
def test_the_share_is_kept_over_any_stretch_of_turns(share: float, start: int, turns: int) -> None:
    given_turns = sum(is_others_turn(turn, share) for turn in range(start, start + turns))
    assert abs(given_turns - share * turns) <= 1.0 + 1e-6


@given(
    jobs=st.lists(st.tuples(st.integers(-2, 2), st.none() | st.floats(1, 9)), max_size=8),
    turn=st.integers(0, 50),
)
def test_priority_stands_above_deadlines(jobs: list[tuple[int, float | None]], turn: int) -> None:
    runnable = sorted(
        (job(seq, 1, deadline)._replace(priority=priority) for seq, (priority, deadline) in enumerate(jobs)),
        key=lambda one: (-one.priority, one.seq),
    )
    ordered = claim_order(runnable, turn)
    assert {one.seq for one in ordered} == {one.seq for one in runnable}
    assert len(ordered) == len(runnable)
    assert [one.priority for one in ordered] == [one.priority for one in runnable]
    if all(one.deadline is None for one in runnable):
        assert ordered == runnable
    for before, after in pairwise(ordered):
        if before.priority == after.priority and before.deadline is not None and after.deadline is not None:
            assert before.deadline <= after.deadline


ROWS = st.lists(st.tuples(st.integers(1, 4), WORDS), min_size=1, max_size=40)
ORDERS = st.permutations([1, 2, 3, 4]).flatmap(
    lambda jobs: st.builds(
        lambda dated, riding, ride: SlackOrder(
            urgent=tuple(jobs[:dated]),
            riders=frozenset(jobs[: dated if ride else min(riding, dated)]),
            others_ride=ride,
        ),
        st.integers(0, 4),
        st.integers(1, 4),
        st.booleans(),
    )
)


@given(rows=ROWS, orders=st.lists(ORDERS, min_size=1, max_size=6), seed=st.integers(0, 99))
@hypothesis_settings(max_examples=examples(200))
def test_the_window_gives_each_row_once_and_only_allowed_ones(
    rows: list[tuple[int, list[int]]], orders: list[SlackOrder], seed: int
) -> None:
    window, dice = WaitingWindow(0.7, seed=seed), random.Random(seed)
    waiting: set[WaitingRow] = set()
    for position, (job, words) in enumerate(rows):
        window.insert(WaitingRow(job, position), chained(words))
        waiting.add(WaitingRow(job, position))
    while waiting:
        order = dice.choice(orders)
        window.arrange(order)
        turn, jobs = window.turn, {row.job for row in waiting}
        row = window.pop()
        waiting.remove(row)
        assert len(window) == len(waiting)
        dated = [job for job in order.urgent if job in jobs]
        others = jobs - set(order.urgent)
        if not dated or (others and is_others_turn(turn, order.share)):
            assert row.job in others
        elif row.job != dated[0]:
            reached("a row rides", True)
            assert row.job in order.riders or (order.others_ride and row.job in others)


def test_a_rider_shares_the_prefix_in_progress_and_nothing_else_goes_ahead() -> None:
    window = WaitingWindow(1.0)
    window.insert(WaitingRow(1, 0), chained([1, 2]))
    window.insert(WaitingRow(1, 1), chained([5, 5]))
    window.insert(WaitingRow(2, 0), chained([1, 3]))
    window.insert(WaitingRow(2, 1), chained([7, 7]))
    window.insert(WaitingRow(3, 0), chained([1, 4]))
    window.arrange(SlackOrder(urgent=(1, 2), riders=frozenset((1, 2)), others_ride=True, share=0.0))
    order = [window.pop() for _ in range(5)]
    assert order[0].job == 1
    rode = [row for row in order if row in (WaitingRow(2, 0), WaitingRow(3, 0))]
    assert order.index(WaitingRow(1, 0)) < order.index(rode[0])
    assert order[order.index(WaitingRow(1, 0)) + 1 :][:2] == rode
    assert order[-1] == WaitingRow(2, 1)


def test_rows_without_a_deadline_stay_in_their_group_while_others_go_between_them() -> None:
    """Rows with a deadline have another prefix, that of the second group."""
    window = WaitingWindow(1.0)
    window.arrange(SlackOrder(urgent=(1,), riders=frozenset({1}), share=0.5))
    groups = [chained([0, 0, 0]), chained([1, 1, 1])]
    for position in range(8):
        window.insert(WaitingRow(1, position), groups[1])
        window.insert(WaitingRow(2, position), groups[position % 2])
    taken = [window.pop() for _ in range(16)]
    assert [row.job for row in taken] == [1, 2] * 8
    assert [row.position % 2 for row in taken if row.job == 2] == [0, 0, 0, 0, 1, 1, 1, 1]
