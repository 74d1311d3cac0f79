"""Rows that may be evicted: which one loses least where a slot alone is missing."""

import pytest

from conserve.engine.policy.victims import Victims, least_lost
from conserve.engine.policy.view import Candidate

BLOCK = 16  # tokens of a KV block
STEP = Candidate("step", 1, 4 * BLOCK + 5, True, 5)  # loses five tokens, and a quarter of four blocks
AT_A_BLOCK = STEP._replace(name="at a block", context=4 * BLOCK)
LONGER = STEP._replace(name="longer", context=40 * BLOCK + 5)
BEGUN = Candidate("begun", 500, 0, blocks=32)  # a prompt that was admitted just now


@pytest.mark.parametrize(
    ("rows", "half_way", "name"),
    [
        ([STEP, BEGUN], {"begun": 300.0}, "step"),
        ([STEP, BEGUN], {"begun": 20.0}, "begun"),
        ([STEP, BEGUN], {"begun": 22.0}, "step"),
        ([STEP, BEGUN], {"step": 0.5, "begun": 20.0}, "begun"),
        ([STEP, LONGER], {}, "step"),
        ([LONGER, BEGUN], {"begun": 160.0}, "begun"),
        ([AT_A_BLOCK, STEP], {}, "at a block"),
        ([STEP, STEP._replace(name="equal")], {}, "equal"),
        ([STEP, LONGER._replace(saved=True)], {}, "longer"),
        ([STEP, LONGER._replace(saved=True)], {"longer": 22.0}, "step"),
    ],
)
def test_the_one_that_loses_least(rows: list[Candidate], half_way: dict[str, float], name: str) -> None:
    assert rows[least_lost(rows, half_way, BLOCK)].name == name


def test_rows_with_their_kv_in_host_memory_are_behind_all_others() -> None:
    rows = [STEP._replace(saved=True), LONGER, BEGUN]
    assert [row.name for row in Victims(rows)] == ["longer", "begun", "step"]
