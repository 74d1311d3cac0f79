"""Groups that always have rows get tokens by their weights, within a bound that no number of rows moves."""

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.errors import SettingsError
from conserve.jobs.window.shares import QUANTA, USUAL_TOKENS, Group, Shares, Weights
from tests.reach import reached

MOST_TOKENS = 2000  # of a row
IN_FLIGHT = 16
ROUNDS = 5  # of the rows that are drawn: one serves hardly ever more than the bound


@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0, 10.0]), min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(1, MOST_TOKENS), st.integers(0, IN_FLIGHT), st.booleans()), min_size=60),
)
def test_tokens_follow_the_weights_within_the_rows_in_flight(
    weights: Sequence[float], rows: Sequence[tuple[int, int, bool]]
) -> None:
    """`rows`: tokens of the row that ends next, which of those in flight it is, and if it goes back instead."""
    shares = Shares(Weights(dict(enumerate(weights))))
    groups = [Group(priority) for priority in range(len(weights))]
    served = dict.fromkeys(groups, 0.0)
    flying: list[tuple[Group, tuple[str, int]]] = []
    number = 0
    for tokens, place, goes_back in [*rows] * ROUNDS:
        for group, count in shares.allot(groups, IN_FLIGHT - len(flying)).items():
            claimed = [("job", number + one) for one in range(count)]
            number += count
            shares.claimed(group, dict.fromkeys(claimed, 1))
            flying += [(group, row) for row in claimed]
        group, row = flying.pop(place % len(flying))
        shares.settled(row, 0 if goes_back else tokens)
        served[group] += 0 if goes_back else tokens
    bound = 2 * IN_FLIGHT * max(MOST_TOKENS, USUAL_TOKENS)
    for one, its in zip(groups, weights, strict=True):
        for other, others in zip(groups, weights, strict=True):
            apart = abs(served[one] / its - served[other] / others)
            assert apart <= bound * (1 / its + 1 / others)
    if reached("the bound is less than what was served", sum(served.values()) > 50_000):
        assert all(deal(shares, groups, 1000)[group] for group in groups), "none is starved"


def deal(shares: Shares, groups: Sequence[Group], rows: int) -> Counter[Group]:
    """Rows of each group when so many are claimed one by one."""
    dealt: Counter[Group] = Counter()
    for number in range(rows):
        for group, count in shares.allot(groups, 1).items():
            shares.claimed(group, {("dealt", number): 1})
            dealt[group] += count
    return dealt


def test_the_first_rows_follow_the_weights_exactly() -> None:
    shares = Shares(Weights.of("10=3,0=1"))
    assert shares.allot([Group(10), Group(0)], 8) == {Group(10): 6, Group(0): 2}
    assert shares.allot([Group(0)], 8) == {Group(0): 8}
    assert shares.allot([], 8) == {}


def test_short_rows_make_up_for_long_ones() -> None:
    """Tokens are shared, not rows: rows of a tenth of the length are ten times as many."""
    shares, long, short = Shares(Weights.of("10=1,0=1")), Group(10), Group(0)
    for group, tokens in ((long, 1000), (short, 100)):
        shares.claimed(group, {("job", group.priority): 1})
        shares.settled(("job", group.priority), tokens)
    rows = deal(shares, [long, short], 110)
    assert rows[short] == pytest.approx(10 * rows[long], abs=12)


def test_a_group_that_had_no_rows_saves_nothing_up() -> None:
    shares, busy, idle = Shares(Weights.of("10=1,0=1")), Group(10), Group(0)
    for row in range(100):
        shares.claimed(busy, {("job", row): 1})
        shares.settled(("job", row), 1000)
        shares.claimed(idle, {})
    assert shares.allot([busy, idle], 10) == {busy: 5, idle: 5}


def test_a_group_that_ran_alone_has_no_debt_once_others_come() -> None:
    """Tokens that it computed while no other group had rows count for nothing."""
    shares, high, low = Shares(Weights.of("10=3,0=1")), Group(10), Group(0)
    jobs = {group: SimpleNamespace(seq=group.priority, priority=group.priority) for group in (high, low)}
    shares.groups([jobs[high]])
    deal(shares, [high], 10_000)
    shares.claimed(high, {})
    shares.groups([jobs[low]])
    deal(shares, [low], 100)
    assert shares.groups(jobs.values()) == [high, low]
    assert shares.allot([high, low], 8) == {high: 6, low: 2}


def test_a_group_whose_last_rows_are_longer_than_usual_has_no_debt() -> None:
    """They end after its last claim, and others come meanwhile."""
    shares, one, other = Shares(Weights.of("jobs")), Group(0, 1), Group(0, 2)
    jobs = [SimpleNamespace(seq=seq, priority=0) for seq in (1, 2)]
    shares.groups(jobs[:1])
    shares.claimed(one, {("a", row): 1 for row in range(64)})
    shares.claimed(one, {})
    for row in range(64):
        shares.settled(("a", row), 5000)
    assert shares.groups(jobs) == [one, other]
    assert shares.allot([one, other], 8) == {one: 4, other: 4}


@pytest.mark.parametrize("gone", ["no row is left", "its jobs are gone"])
def test_groups_that_come_after_a_pause_begin_level(gone: str) -> None:
    shares, one, other = Shares(Weights.of("jobs")), Group(0, 1), Group(0, 2)
    first, second = (SimpleNamespace(seq=seq, priority=0) for seq in (1, 2))
    deal(shares, [one], 1000)
    if gone == "no row is left":
        shares.claimed(one, {})
    assert shares.groups([]) == []
    assert shares.groups([first, second]) == [one, other]
    assert shares.allot([one, other], 8) == {one: 4, other: 4}


def test_the_charge_of_an_attempt_that_brought_nothing_stands() -> None:
    shares, timed_out, answered = Shares(Weights.of("jobs")), Group(0, 1), Group(0, 2)
    for row in range(10):
        shares.claimed(timed_out, {("a", row): 1})
        shares.stands(("a", row))
        shares.claimed(answered, {("b", row): 1})
        shares.settled(("b", row), round(USUAL_TOKENS))
    assert shares.allot([timed_out, answered], 8) == {timed_out: 4, answered: 4}


def test_a_group_whose_jobs_are_gone_holds_nothing_up() -> None:
    """A new job begins level with those that have rows, and not with the old count of one that has none."""
    shares = Shares(Weights.of("jobs"))
    jobs = [SimpleNamespace(seq=seq, priority=0) for seq in range(3)]
    first, second, new = shares.groups(jobs)
    shares.claimed(first, {("first", 0): 1})
    shares.claimed(second, {("second", row): 1 for row in range(100)})
    assert shares.groups(jobs[1:]) == [second, new]
    assert shares.allot([second, new], 8) == {second: 4, new: 4}


@pytest.mark.parametrize(("jobs", "rows"), [(64, 64), (64, 256), (3, 64), (64, 7)])
def test_a_claim_is_of_few_groups_and_the_next_ones_are_of_the_others(jobs: int, rows: int) -> None:
    shares, groups = Shares(Weights.of("jobs")), [Group(0, seq) for seq in range(jobs)]
    dealt: Counter[Group] = Counter()
    for claim in range(3 * jobs):
        allotted = shares.allot(groups, rows)
        assert sum(allotted.values()) == rows
        assert len(allotted) <= QUANTA + 1
        for group, count in allotted.items():
            shares.claimed(group, {(f"{group.job}", 1000 * claim + row): 1 for row in range(count)})
        dealt += Counter(allotted)
    assert max(dealt.values()) - min(dealt[group] for group in groups) <= max(1, rows // QUANTA)


def test_rows_that_are_claimed_again_are_charged_once() -> None:
    shares, one, other = Shares(Weights.of("jobs")), Group(0, 1), Group(0, 2)
    shares.claimed(other, {("b", 0): 1})
    for _ in range(5):  # its leases were lost
        shares.claimed(one, {("a", 0): 1})
    assert shares.allot([one, other], 2) == {one: 1, other: 1}


def test_rows_whose_leases_were_lost_are_charged_to_no_group() -> None:
    """Another harvester computes them, and they may never come back."""
    shares, one, other = Shares(Weights.of("jobs")), Group(0, 1), Group(0, 2)
    shares.claimed(other, {("b", 0): 3})
    shares.claimed(one, {("a", 0): 1, ("a", 1): 2, ("a", 2): 1})
    shares.lost({1})
    assert shares.allot([one, other], 2) == {one: 1, other: 1}
    shares.settled(("a", 0), 1000)  # late, so that nothing was written
    assert shares.allot([one, other], 2) == {one: 1, other: 1}
    shares.claimed(one, {("a", row): 4 for row in range(100)})
    shares.lost()
    assert shares.allot([one, other], 2) == {one: 1, other: 1}


@pytest.mark.parametrize("text", ["", "x", "10", "10=", "10=0", "10=-1", "10=inf", "10=nan", "a=1", "10=1,"])
def test_weights_that_cannot_be_read_are_a_sentence(text: str) -> None:
    with pytest.raises(
        SettingsError, match="--share takes weights above 0 of priorities, like 10=3,0=1, or jobs"
    ):
        Weights.of(text)


def test_groups_are_priorities_or_jobs() -> None:
    jobs = [
        SimpleNamespace(seq=1, priority=10),
        SimpleNamespace(seq=2, priority=0),
        SimpleNamespace(seq=3, priority=0),
    ]
    assert Shares(Weights.of("10=3, 0=1")).groups(jobs) == [Group(10), Group(0)]
    assert Shares(Weights.of("jobs")).groups(jobs) == [Group(0, 1), Group(0, 2), Group(0, 3)]
    assert Weights.of("10=3").of_group(Group(5)) == 1
    with pytest.raises(SettingsError, match="names the priority 10 twice"):
        Weights.of("10=3,10=1")
