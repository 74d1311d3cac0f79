"""The waiting window: no row is lost or given out twice, and utility is kept to."""

import math
import random

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from conserve.jobs.window.waiting import WaitingRow, WaitingWindow, uniform
from tests.conftest import examples
from tests.property.test_prefix_tree import WORDS, Key, chained, next_of
from tests.reach import reached

JOBS = 3


class Windows(RuleBasedStateMachine):
    """Rows come, go, and are cancelled one by one or with their job."""

    def __init__(self) -> None:
        super().__init__()
        self.window = WaitingWindow(0.6, seed=7)
        self.waiting: dict[WaitingRow, Key] = {}
        self.cursor: Key = ()
        self.turns = 0
        self.positions = [0] * JOBS

    @rule(job=st.integers(0, JOBS - 1), words=WORDS)
    def insert(self, job: int, words: list[int]) -> None:
        row = WaitingRow(job, self.positions[job])
        self.positions[job] += 1
        self.waiting[row] = chained(words)
        self.window.insert(row, self.waiting[row])

    @precondition(lambda self: self.waiting)
    @rule()
    def pop(self) -> None:
        row = self.window.pop()
        if reached("its prefix decides", uniform(7, self.turns) < 0.6):
            ordered = sorted(self.waiting)
            keys = {place: self.waiting[waiting] for place, waiting in enumerate(ordered)}
            assert row == ordered[next_of(keys, self.cursor)]
            self.cursor = self.waiting[row]
        else:
            assert row == min(self.waiting)
        self.turns += 1
        del self.waiting[row]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.waiting)))
        self.window.discard(row)
        del self.waiting[row]

    @rule(job=st.integers(0, JOBS - 1))
    def cancel_job(self, job: int) -> None:
        self.window.discard_job(job)
        self.waiting = {row: key for row, key in self.waiting.items() if row.job != job}

    @invariant()
    def it_knows_how_many_wait(self) -> None:
        assert len(self.window) == len(self.waiting)
        for job in range(JOBS):
            keys = [key for row, key in self.waiting.items() if row.job == job]
            assert self.window.waiting(job) == len(keys)
            assert self.window.blocks(job) == sum(map(len, keys))

    def teardown(self) -> None:
        while self.waiting:
            self.pop()


TestWindows = Windows.TestCase
TestWindows.settings = hypothesis_settings(max_examples=examples(100), stateful_step_count=50)


@pytest.mark.parametrize("utility", [0.0, 0.25, 0.9, 0.99, 1.0])
def test_so_large_a_share_is_taken_for_its_prefix(utility: float) -> None:
    """Six standard deviations of a binomial are allowed: a right one fails once in 500 million runs."""
    turns = 20_000
    taken = sum(uniform(3, turn) < utility for turn in range(turns))
    assert abs(taken - turns * utility) <= 6 * math.sqrt(turns * utility * (1 - utility))


def test_turns_do_not_know_of_each_other() -> None:
    """Neither of the turn before nor of other seeds: correlations are as small as chance leaves them."""
    numbers = [uniform(seed, turn) for seed in (0, 1) for turn in range(10_000)]
    for distance in (1, 2, 10_000):
        pairs = list(zip(numbers, numbers[distance:], strict=False))
        covariance = sum((a - 0.5) * (b - 0.5) for a, b in pairs) / len(pairs)
        assert abs(covariance * 12) < 6 / math.sqrt(len(pairs))


def filled(utility: float, keys: list[Key], **named: int) -> WaitingWindow:
    window = WaitingWindow(utility, **named)
    for position, key in enumerate(keys):
        window.insert(WaitingRow(position % JOBS, position // JOBS), key)
    return window


def test_one_seed_gives_one_order_and_another_another() -> None:
    dice = random.Random(1)
    keys = [chained([dice.randrange(4) for _ in range(5)]) for _ in range(300)]
    orders = [[window.pop() for _ in keys] for window in (filled(0.5, keys, seed=s) for s in (1, 1, 2))]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


def test_at_0_the_oldest_goes_first_and_at_1_no_stale_row_ever() -> None:
    keys = [chained([9])] + [chained([1, 2, n % 3]) for n in range(60)]
    oldest = filled(0.0, keys)
    rows = [oldest.pop() for _ in keys]
    assert rows == sorted(rows)
    sharing = filled(1.0, keys)
    assert [sharing.pop() for _ in keys][-1] == WaitingRow(0, 0)


def test_an_order_goes_on_where_it_was_left() -> None:
    """Another window with the turn, the cursor and the waiting rows goes on as the first would have."""
    dice = random.Random(2)
    keys = [chained([dice.randrange(3) for _ in range(5)]) for _ in range(200)]
    first = filled(0.8, keys)
    given = [first.pop() for _ in range(77)]
    second = WaitingWindow(0.8, turn=first.turn, cursor=first.cursor)
    waiting = [WaitingRow(n % JOBS, n // JOBS) for n in range(len(keys))]
    dice.shuffle(waiting)
    for row in waiting:
        if row not in given:
            second.insert(row, keys[row.position * JOBS + row.job])
    left = len(keys) - len(given)
    assert [second.pop() for _ in range(left)] == [first.pop() for _ in range(left)]


@pytest.mark.parametrize("utility", [0.5, 0.9])
def test_a_row_without_sharing_waits_as_long_as_its_staler_ones_allow(utility: float) -> None:
    """While rows that share come for ever, its turn among the stale comes every 1 / (1 - u) turns."""
    staler, runs = 10, 200
    waits = [wait_of_a_lone_row(utility, staler, seed, most=10_000) for seed in range(runs)]
    expected = (staler + 1) / (1 - utility)
    spread = math.sqrt((staler + 1) * utility) / (1 - utility)  # of a negative binomial
    assert sum(waits) / runs <= expected + 4 * spread / math.sqrt(runs)


def test_at_1_a_row_without_sharing_waits_for_ever() -> None:
    assert wait_of_a_lone_row(1.0, 10, 0, most=3_000) == 3_000


def wait_of_a_lone_row(utility: float, staler: int, seed: int, *, most: int) -> int:
    """Turns until it goes, while as many rows that share come as go."""
    window = WaitingWindow(utility, seed=seed)
    lone = WaitingRow(0, staler)
    for position in range(staler):
        window.insert(WaitingRow(0, position), chained([1, 2, position]))
    window.insert(lone, chained([0]))
    for turn in range(most):
        window.insert(WaitingRow(1, turn), chained([1, 2, turn]))
        if window.pop() == lone:
            return turn + 1
    return most


def test_random_numbers_of_turns_are_those_of_splitmix64() -> None:
    """The first of seed 0, as published with the generator."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [uniform(0, turn) for turn in range(4)] == [(number >> 11) / 2**53 for number in published]
    assert len({uniform(seed, 0) for seed in range(100)}) == 100
