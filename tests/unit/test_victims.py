"""Rows that may be evicted: which one gives its slot up."""

import pytest

from conserve.engine.policy.victims import LATEST, Victims, for_a_slot
from conserve.engine.policy.view import Candidate

BLOCK = 16  # tokens of a KV block
STEP = Candidate("step", 1, 4 * BLOCK + 5, True, 5)  # loses five tokens, and a quarter of four blocks: 21
AT_A_BLOCK = STEP._replace(name="at a block", context=4 * BLOCK)
LONGER = STEP._replace(name="longer", context=40 * BLOCK + 5)
BEGUN = Candidate("begun", 500, 0, blocks=32)  # a prompt that was admitted just now
FIRST = Candidate("first", 1, 1, True, 1)  # would lose least, and never pays for later rows


@pytest.mark.parametrize(
    ("rows", "half_way", "name"),
    [
        ([FIRST, FIRST, STEP, BEGUN], {"begun": 300.0}, "step"),
        ([FIRST, FIRST, STEP, BEGUN], {"begun": 20.0}, "begun"),
        ([FIRST, FIRST, STEP, BEGUN], {"begun": 22.0}, "step"),
        ([FIRST, FIRST, STEP, BEGUN], {"step": 0.5, "begun": 21.2}, "begun"),
        ([FIRST, FIRST, LONGER, BEGUN], {"begun": 160.0}, "begun"),
        ([FIRST, FIRST, LONGER, BEGUN], {"begun": 170.0}, "longer"),
        ([STEP, AT_A_BLOCK, LONGER, BEGUN], {"begun": 300.0}, "longer"),
        ([FIRST, FIRST, FIRST, AT_A_BLOCK, STEP, BEGUN], {"begun": 300.0}, "at a block"),
        ([FIRST, FIRST, STEP, STEP._replace(name="equal"), BEGUN], {"begun": 300.0}, "equal"),
        ([STEP, BEGUN._replace(name="other"), BEGUN], {"begun": 300.0, "other": 200.0}, "begun"),
        ([FIRST, FIRST, STEP, LONGER._replace(saved=True)], {"longer": 22.0}, "step"),
        ([FIRST, FIRST, STEP, LONGER._replace(saved=True)], {"longer": 20.0}, "longer"),
        ([FIRST, AT_A_BLOCK, LONGER], {}, "longer"),  # none left an iteration: the last one
        ([FIRST, BEGUN], {"first": 0.0, "begun": 16.0}, "begun"),  # a block of its tokens is no loss to avoid
        ([BEGUN], {"begun": 300.0}, "begun"),
    ],
)
def test_the_row_that_gives_its_slot_up(rows: list[Candidate], half_way: dict[str, float], name: str) -> None:
    assert rows[for_a_slot(rows, half_way, BLOCK)].name == name


def test_only_the_latest_rows_are_looked_at() -> None:
    """An arrival waits for the choice among what may be a thousand rows."""
    rows = [STEP] * 60 + [AT_A_BLOCK] + [STEP] * (LATEST - 1)
    assert for_a_slot([*rows, BEGUN], {"begun": 300.0}, BLOCK) == 60
    assert for_a_slot([*rows, STEP, BEGUN], {"begun": 300.0}, BLOCK) == len(rows)


def test_rows_with_their_kv_in_host_memory_are_behind_all_others() -> None:
    rows = [STEP._replace(saved=True), LONGER, BEGUN]
    assert [row.name for row in Victims(rows)] == ["longer", "begun", "step"]
