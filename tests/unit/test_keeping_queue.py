"""Free KV blocks of which some are kept: vLLM's own pool takes from them whatever it likes, and loses none."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.warned import OF_VLLM

pytest.importorskip("vllm")
pytestmark = [*OF_VLLM]

BLOCKS = 12


def pool_and_queue() -> tuple[Any, Any]:
    """vLLM's pool of `BLOCKS` blocks over our queue; block 0 is vLLM's own."""
    from vllm.v1.core.block_pool import BlockPool

    from conserve.engine.vllm.scheduling.prefixes import KeepingQueue

    pool = BlockPool(BLOCKS + 1, enable_caching=True, hash_block_size=4)
    pool.free_block_queue = queue = KeepingQueue(pool.free_block_queue.get_all_free_blocks())
    return pool, queue


def hashed(blocks: list[Any]) -> list[Any]:
    """The blocks with names, by which the cache finds them."""
    for block in blocks:
        block.reset_hash()
        block.set_block_hash(b"%d" % block.block_id)
    return blocks


def names(blocks: list[Any]) -> list[int]:
    return [block.block_id for block in blocks]


def left(pool: Any, queue: Any, count: int, *, now: float = 0.0) -> list[Any]:
    """Blocks that a live request held and left, in the order of its tokens."""
    blocks = hashed(pool.get_new_blocks(count))
    queue.keep(reversed(blocks), now=now)
    pool.free_blocks(reversed(blocks))
    return list(blocks)


def test_kept_blocks_are_given_out_last_and_the_end_of_a_prompt_before_its_beginning() -> None:
    pool, queue = pool_and_queue()
    kept = left(pool, queue, 3)
    assert (queue.kept, pool.get_num_free_blocks()) == (3, BLOCKS)
    others = pool.get_new_blocks(BLOCKS - 3)
    assert not {*names(others)} & {*names(kept)}
    assert names(pool.get_new_blocks(3)) == names(kept)[::-1]
    assert (queue.kept, pool.get_num_free_blocks()) == (0, 0)


def test_rows_that_come_and_go_take_none_of_them() -> None:
    pool, queue = pool_and_queue()
    kept = left(pool, queue, 5)
    for _ in range(20):
        row = hashed(pool.get_new_blocks(BLOCKS - 5))
        pool.free_blocks(reversed(row))
    assert all(block.block_hash is not None for block in kept)
    assert queue.kept == 5


def test_a_block_that_a_request_finds_is_kept_again_when_it_is_left() -> None:
    pool, queue = pool_and_queue()
    kept = left(pool, queue, 3)
    pool.touch(kept[:2])
    assert (queue.kept, pool.get_num_free_blocks()) == (1, BLOCKS - 2)
    pool.free_blocks(reversed(kept[:2]))
    assert (queue.kept, pool.get_num_free_blocks()) == (3, BLOCKS)


def test_the_longest_unused_are_dropped_first_and_so_are_old_ones() -> None:
    pool, queue = pool_and_queue()
    first, second, third = (left(pool, queue, 2, now=now) for now in (1.0, 2.0, 3.0))
    queue.drop(most=5, before=0.0)
    assert queue.kept == 5
    queue.drop(most=5, before=1.5)
    assert queue.kept == 4
    assert pool.get_num_free_blocks() == BLOCKS
    given_out = names(pool.get_new_blocks(BLOCKS - 4))
    assert {*names(first)} <= {*given_out}
    assert not {*names(second), *names(third)} & {*given_out}


def test_a_block_in_use_can_be_dropped_and_is_a_usual_one_from_then_on() -> None:
    pool, queue = pool_and_queue()
    kept = left(pool, queue, 2)
    pool.touch(kept)
    queue.drop(most=0, before=0.0)
    pool.free_blocks(reversed(kept))
    assert (queue.kept, pool.get_num_free_blocks()) == (0, BLOCKS)


def test_a_block_without_a_name_is_of_no_use() -> None:
    pool, queue = pool_and_queue()
    kept = left(pool, queue, 2)
    pool.touch(kept)
    pool.evict_blocks({kept[0].block_id})
    pool.free_blocks(reversed(kept))
    assert queue.kept == 1


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "leave", "keep", "find", "drop", "one"]), st.integers(0, 6)),
        max_size=40,
    )
)
def test_whatever_happens_each_block_is_free_once_or_in_use(steps: list[tuple[str, int]]) -> None:
    pool, queue = pool_and_queue()
    held: list[list[Any]] = []  # by requests
    for now, (what, n) in enumerate(steps):
        if what == "take" and n <= pool.get_num_free_blocks():
            usual = pool.get_num_free_blocks() - queue.kept
            before = queue.kept
            held.append(hashed(pool.get_new_blocks(n)))
            assert before - queue.kept == max(0, n - usual), "kept blocks are the last ones"
        elif what == "one" and pool.get_num_free_blocks():
            block = queue.popleft()
            queue.append(block)
        elif what in ("leave", "keep") and held:
            blocks = held.pop(n % len(held))
            if what == "keep":
                queue.keep(reversed(blocks), now=float(now))
            pool.free_blocks(reversed(blocks))
        elif what == "find":
            free = [block for block in pool.blocks[1:] if not block.ref_cnt and block.block_hash is not None]
            pool.touch(free[:n])
            held.append(free[:n])
        elif what == "drop":
            queue.drop(most=n, before=now - 10.0)
            assert queue.kept <= n
        in_use = {block.block_id for blocks in held for block in blocks}
        assert pool.get_num_free_blocks() == BLOCKS - len(in_use)
    for blocks in held:
        pool.free_blocks(reversed(blocks))
    assert sorted(names(pool.get_new_blocks(BLOCKS))) == [*range(1, BLOCKS + 1)]


def prefixes_of(*, caches: bool = True, groups: int = 1, others: Any = ()) -> tuple[Any, Any]:
    """Live prefixes of a pool with blocks of four tokens, and what vLLM's manager says of it.

    `others`: kinds of layers with a pool of their own.
    """
    from vllm.v1.core.block_pool import BlockPool

    from conserve.engine.vllm.scheduling.prefixes import LivePrefixes

    pool = BlockPool(BLOCKS + 1, enable_caching=caches, hash_block_size=4)
    kinds = [SimpleNamespace(block_pool=pool, block_size=4, req_to_blocks={})] * groups
    manager = SimpleNamespace(
        block_pool=pool,
        coordinator=SimpleNamespace(single_type_managers=[*others, *kinds]),
        prefix_cache_lookup_enabled=lambda request: caches,
    )
    prefixes = LivePrefixes(manager, share=0.5)
    prefixes.switch(on=True)
    return prefixes, manager


@pytest.mark.parametrize(("computed", "lost"), [(12, 12), (9, 8), (3, 0)])
def test_what_an_aborted_request_did_not_compute_is_not_lost(computed: int, lost: int) -> None:
    prefixes, manager = prefixes_of()
    one: Any = SimpleNamespace(
        request_id="one",
        priority=0,
        num_prompt_tokens=13,
        num_computed_tokens=computed,
        num_preemptions=0,
        prefill_stats=SimpleNamespace(num_local_cached_tokens=0),
        block_hashes=[b"a", b"b", b"c"],
    )
    (kind,) = manager.coordinator.single_type_managers
    kind.req_to_blocks["one"] = hashed(manager.block_pool.get_new_blocks(3))
    prefixes.end(one, now=0.0)
    again: Any = SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(req_id="one", num_computed_tokens=0)])
    prefixes.start(again, {"one": one}, now=1.0)
    assert (prefixes.report()["lost_tokens"], prefixes.report()["prompt_tokens"]) == (lost, 13)


@pytest.mark.parametrize("without", [{"caches": False}, {"groups": 0}])
def test_a_cache_that_is_off_or_of_a_model_without_kv_keeps_nothing(without: Any) -> None:
    """Such as one that embeds."""
    prefixes, _ = prefixes_of(**without)
    assert not prefixes.on
    assert prefixes.kept == 0


def test_blocks_of_another_pool_are_left_alone() -> None:
    """Such as vLLM's HiSparse has in host memory, whose blocks have the same numbers."""
    from vllm.v1.core.block_pool import BlockPool

    host = BlockPool(BLOCKS + 1, enable_caching=True, hash_block_size=4)
    theirs = SimpleNamespace(block_pool=host, block_size=4, req_to_blocks={})
    prefixes, manager = prefixes_of(others=[theirs])
    ours = manager.coordinator.single_type_managers[-1]
    one: Any = SimpleNamespace(
        request_id="one", priority=0, num_computed_tokens=12, block_hashes=[b"a", b"b", b"c"]
    )
    ours.req_to_blocks["one"] = hashed(manager.block_pool.get_new_blocks(3))
    theirs.req_to_blocks["one"] = hashed(host.get_new_blocks(5))
    prefixes.end(one, now=0.0)
    host.free_blocks(theirs.req_to_blocks["one"])
    manager.block_pool.free_blocks(ours.req_to_blocks["one"])
    prefixes.forget()
    for pool in (manager.block_pool, host):
        assert sorted(names(pool.get_new_blocks(BLOCKS))) == [*range(1, BLOCKS + 1)]
