"""Places of the KV blocks whose copies are timed."""

import random

import pytest

pytestmark = pytest.mark.engine


def test_a_device_copies_blocks_side_by_side_in_one_copy_and_a_cpu_each_alone() -> None:
    from conserve.engine.runtime.copies import places

    ((host, cache),) = places(8, 100, random.Random(0), together=True)
    assert isinstance(host, slice)
    assert isinstance(cache, slice)
    assert host == slice(8)
    assert cache.stop - cache.start == 8
    assert 0 <= cache.start <= 92
    alone = places(8, 100, random.Random(0), together=False)
    assert [row for row, _ in alone] == list(range(8))
    assert len({block for _, block in alone}) == 8
    assert places(100, 100, random.Random(0), together=True) == [(slice(100), slice(0, 100))]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_caches_have_their_blocks_after_copies_there_and_back() -> None:
    import torch

    from conserve.engine.runtime.copies import time_copies

    caches = [torch.rand(2, 10, 16), torch.rand(10, 16)]
    before = [cache.clone() for cache in caches]
    times = time_copies(caches, 10, [1, 4])
    assert [(one.blocks, one.bytes) for one in times] == [(1, 3 * 16 * 4), (4, 4 * 3 * 16 * 4)]
    assert all(torch.equal(*pair) for pair in zip(caches, before, strict=True))
