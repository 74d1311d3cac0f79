"""Hundreds of rows may run beside live requests that leave time for few: the others are not looked at."""

from collections.abc import Iterator, Sequence
from itertools import chain, count
from math import inf

import pytest

from conserve.engine.policy.conserve import Conserve
from conserve.engine.policy.decode_sums import READ_AT_ONCE, Steps
from conserve.engine.policy.victims import Victims
from conserve.engine.policy.view import Candidate, Lazy, Slo
from tests.policy_views import MS_PER_TOKEN, decodes, view_of

LIVE = Candidate("live", 1, 20, True, 2, answered=True)
PROMPT = Candidate("prompt", 30, 0, blocks=2)


def unread() -> Iterator[Candidate]:
    raise AssertionError("this request finds no time")
    yield  # a generator


class TestASequenceThatIsMadeAsItIsRead:
    def test_it_reads_as_far_as_it_is_asked(self) -> None:
        lazy = Lazy(count())
        assert (lazy[3], lazy.known) == (3, 4)
        assert (list(lazy[2:6]), lazy.known) == ([2, 3, 4, 5], 6)
        assert (lazy[0], lazy.known) == (0, 6)
        assert lazy.has(7)
        assert lazy.known == 7
        assert Lazy(iter("abcd"))[-1] == "d"
        assert list(Lazy(iter("abcd"))[:-1]) == [*"abc"]
        assert list(Lazy(count())[:0]) == []
        one = Lazy(iter("a"))
        assert (bool(one), one.known) == (True, 1)
        assert bool(Lazy(count()))

    @pytest.mark.parametrize("read_before", [0, 2, 4])
    def test_it_is_like_a_tuple_to_its_end(self, read_before: int) -> None:
        values = tuple("abcd")
        lazy = Lazy(iter(values))
        lazy.has(read_before)
        assert (len(lazy), [*lazy], lazy[-1], list(lazy[1:])) == (4, [*values], "d", [*values[1:]])
        assert (list(lazy[:-1]), list(lazy[3:9]), "c" in lazy) == ([*values[:-1]], ["d"], True)
        for place in (slice(-2, 3), slice(3, 1, -1), slice(None, None, 2), slice(2), slice(0, 0)):
            assert tuple(Lazy(iter(values))[place]) == values[place]
        assert not lazy.has(5)
        with pytest.raises(IndexError):
            lazy[4]

    def test_an_empty_one_is_false(self) -> None:
        assert not Lazy(iter(()))


class TestSteps:
    def test_prompts_among_the_requests_are_passed_over(self) -> None:
        some = [PROMPT, *decodes(2, "a"), PROMPT, PROMPT, *decodes(1, "b")]
        steps = Steps(some, (), 16)
        assert [steps.has(number) for number in range(5)] == [True, True, True, True, False]
        assert [step.name for step in steps.requests] == ["a0", "a1", "b0"]

    @pytest.mark.parametrize("looked", [0, 1, READ_AT_ONCE + 3, 40])
    def test_sums_are_the_same_however_far_they_were_looked_at_before(self, looked: int) -> None:
        growing = [Candidate(f"row{n}", 1 + n % 2, 16 * n, True, n + n % 3 % 2) for n in range(40)]
        steps, whole = Steps(growing, (), 16), Steps(growing, (), 16)
        steps.has(looked)
        assert len(steps) == len(whole) == 40
        for number in (0, 1, 20, 39, 40):
            assert steps.tokens(number) == sum(one.tokens for one in growing[:number])
            assert steps.blocks(number) == whole.blocks(number)
            assert steps.named(number) == {one.name: one.tokens for one in growing[:number]}


def beside_a_live_request(rows: Sequence[Candidate], tokens: float) -> set[str]:
    """Rows that get a decode step in an iteration of so many tokens, one of them the live request's."""
    view = view_of(
        online=[LIVE], offline=Lazy(chain(rows, unread())), slo=Slo(tbt_ms=10 + tokens), model=MS_PER_TOKEN
    )
    return Conserve().plan(view).tokens.keys() - {"live"}


@pytest.mark.parametrize("fitting", [0, 1, 3, READ_AT_ONCE - 1])
def test_rows_that_find_no_time_are_not_looked_at(fitting: int) -> None:
    rows = decodes(2 * READ_AT_ONCE, "row")
    assert beside_a_live_request(rows, 1 + fitting) == {row.name for row in rows[:fitting]}


def test_no_row_is_looked_at_beside_a_prompt_that_leaves_no_time() -> None:
    live = Candidate("live", 100, 0)
    view = view_of(waiting_online=[live], waiting_offline=unread(), slo=Slo(harm=0.1), own_ms=50.0)
    assert Conserve().plan(view).tokens == {"live": 100}


def test_all_rows_are_looked_at_where_they_find_time() -> None:
    with pytest.raises(AssertionError, match="finds no time"):
        beside_a_live_request(decodes(3), inf)


def test_victims_are_sorted_when_one_is_evicted() -> None:
    rows = [Candidate("saved", 1, 20, True, 2, saved=True), *decodes(2, "row")]
    looked: list[str] = []

    def looked_at() -> Iterator[Candidate]:
        for row in rows:
            looked.append(row.name)
            yield row

    victims = Victims(looked_at())
    assert not looked
    assert victims.pop().name == "saved"
    assert [victim.name for victim in victims] == ["row0", "row1"]
