"""KV blocks of models whose layers keep their KV in several groups, or forget what is behind a window."""

import pytest

from conserve.engine.policy.kv_groups import KvGroup, blocks_lacking, blocks_taken
from conserve.engine.policy.view import Candidate

WINDOW = KvGroup(16, kept_tokens=32)


@pytest.mark.parametrize(("end", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_a_group_that_keeps_all_has_a_block_for_each_of_its_sizes(end: int, blocks: int) -> None:
    assert KvGroup(16).blocks(0, end) == KvGroup(16).blocks(end, end) == blocks
    assert KvGroup(16).forgotten(end) == 0


@pytest.mark.parametrize(("computed", "forgotten"), [(0, 0), (32, 0), (47, 0), (48, 1), (63, 1), (64, 2)])
def test_a_window_forgets_whole_blocks_behind_it(computed: int, forgotten: int) -> None:
    assert WINDOW.forgotten(computed) == forgotten
    assert WINDOW.blocks(computed, computed + 16) == -(-(computed + 16) // 16) - forgotten


@pytest.mark.parametrize(("end", "blocks"), [(16, 1), (64, 4), (65, 4), (1600, 4)])
def test_a_group_has_no_more_blocks_than_a_request_may_have_of_it(end: int, blocks: int) -> None:
    assert KvGroup(16, most_blocks=4).blocks(0, end) == blocks


def test_a_request_takes_the_blocks_of_each_group() -> None:
    groups = [KvGroup(16), WINDOW, KvGroup(64, most_blocks=1)]
    assert blocks_taken(groups, 64, 80) == 5 + 3 + 1


@pytest.mark.parametrize(("blocks", "lacking"), [(0, 8), (7, 1), (8, 0), (9, 0)])
def test_a_request_lacks_what_it_has_not_yet(blocks: int, lacking: int) -> None:
    row = Candidate("row", 20, 64, blocks=blocks)
    assert blocks_lacking(row, 16, [KvGroup(16), WINDOW], 16) == lacking
    assert blocks_lacking(row._replace(blocks=4), 16, (), 16) == 1, "of one group that keeps all"
    assert blocks_lacking(row._replace(blocks=4), 17, (), 16) == 2
