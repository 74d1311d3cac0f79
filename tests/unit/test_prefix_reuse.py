"""Blocks that live requests alone would find in a prefix cache, and the distance back to them."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.engine.runtime.prefix_reuse import MOST, STEP, BucketCounts, PrefixReuse

SHARE = 0.95


def used(reuse: PrefixReuse, *prompts: str, now: float = 0.0) -> None:
    for prompt in prompts:
        reuse.used(prompt, now=now)


def test_a_prompt_finds_the_blocks_up_to_the_first_that_is_missing() -> None:
    reuse = PrefixReuse(100)
    used(reuse, "abcd")
    assert reuse.found("abxd", now=0.0) == 2
    assert reuse.found("abcdef", now=0.0) == 4
    assert reuse.found("xbcd", now=0.0) == 0


def test_the_longest_unused_blocks_are_dropped_first_and_of_one_request_the_last() -> None:
    reuse = PrefixReuse(6)
    used(reuse, "abcd", "wxyz")
    assert reuse.found("abcd", now=0.0) == 2, "c and d made room"
    assert reuse.found("wxyz", now=0.0) == 4


def test_a_block_that_is_used_again_stays_longer() -> None:
    reuse = PrefixReuse(5)
    used(reuse, "ab", "cd", "ab", "ef")
    assert reuse.found("ab", now=0.0) == 2
    assert reuse.found("cd", now=0.0) == 1


def test_nothing_is_reached_for_before_anything_is_found() -> None:
    reuse = PrefixReuse(100)
    assert reuse.reach(SHARE) == (0, 0.0)
    used(reuse, "ab")
    reuse.found("xy", now=5.0)
    assert reuse.reach(SHARE) == (0, 0.0)


def test_it_is_early_until_as_much_is_used_as_the_cache_holds() -> None:
    reuse = PrefixReuse(6)
    used(reuse, "abcde")
    assert reuse.early
    used(reuse, "a")
    assert not reuse.early


def test_the_reach_covers_what_was_used_between_and_the_time() -> None:
    reuse = PrefixReuse(104)
    used(reuse, "abcd", now=10.0)
    for n in range(20):
        reuse.used([f"{n}-{place}" for place in range(5)], now=20.0)
    assert reuse.found("abcd", now=70.0) == 4
    blocks, age_s = reuse.reach(SHARE)
    assert 104 <= blocks <= 104 * STEP + 1
    assert 60 <= age_s <= 60 * STEP


def test_a_rare_long_reach_is_left_out() -> None:
    reuse = PrefixReuse(101)
    used(reuse, "z", now=0.0)
    for n in range(100):
        used(reuse, "a", now=float(n))
        assert reuse.found("a", now=n + 1.0) == 1
    assert reuse.found("z", now=900.0) == 1
    assert reuse.reach(SHARE).age_s < 2
    assert reuse.reach(1.0).age_s >= 900


def test_what_is_forgotten_is_not_found_and_the_reach_stays() -> None:
    reuse = PrefixReuse(2)
    used(reuse, "ab")
    reuse.found("ab", now=3.0)
    reach = reuse.reach(SHARE)
    reuse.forget()
    assert reuse.found("ab", now=3.0) == 0
    assert reuse.reach(SHARE) == reach


def test_old_counts_fade() -> None:
    counts = BucketCounts()
    counts.note(1000.0, MOST)
    for _ in range(12):
        counts.note(10.0, MOST // 2)
    assert counts.quantile(0.9) < 13


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0, 1.3, 700.0])
def test_a_quantile_is_no_smaller_than_what_was_counted(value: float) -> None:
    counts = BucketCounts()
    counts.note(value, 3)
    assert value <= counts.quantile(1.0) <= max(1.0, value * STEP)


@given(st.lists(st.text("abcde", min_size=1, max_size=5).map(lambda one: "".join(dict.fromkeys(one)))))
def test_it_finds_what_a_cache_of_that_size_holds(prompts: list[str]) -> None:
    reuse, cache = PrefixReuse(4), OrderedDict[str, None]()
    for prompt in prompts:
        held = next((n for n, block in enumerate(prompt) if block not in cache), len(prompt))
        assert reuse.found(prompt, now=0.0) == held
        reuse.used(prompt, now=0.0)
        for block in reversed(prompt):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > 4:
            cache.popitem(last=False)
