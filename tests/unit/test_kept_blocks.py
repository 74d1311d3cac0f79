"""KV blocks that are kept for live requests: these take them, rows do not, and one row may always run."""

from typing import Any

import pytest

from conserve.engine.policy.composer import Composer
from conserve.engine.policy.recorded import VERSION_OF_KEPT, line_of, recorded, version_of
from conserve.engine.policy.view import Candidate, Slo
from tests.policy_views import FRESH, decodes, plan_of, view_of

BLOCKS = 7  # of `FRESH`, and of a live prompt as long
LIVE = Candidate("live", 100, 0)
TWO = decodes(2)  # rows that need no further block
GROWING = [Candidate(f"row{n}", 1, 32, True, 2) for n in range(2)]  # each needs one


def started(name: str = "fresh", **changes: Any) -> bool:
    return name in plan_of(**changes).admitted


@pytest.mark.parametrize(("kept", "starts"), [(0, True), (3, True), (4, False), (100, False)])
def test_a_row_starts_in_what_is_left(kept: int, starts: bool) -> None:
    room = {"free_blocks": BLOCKS + 4, "kept_blocks": kept, "offline": TWO}  # one is spare for two rows
    assert started(waiting_offline=[FRESH], **room) == starts


@pytest.mark.parametrize(
    ("free", "kept", "left"), [(5, 5, 0), (5, 3, 2), (5, 9, 0), (-2, 0, -2), (-2, 4, -2)]
)
def test_what_rows_leave_is_no_more_than_is_free(free: int, kept: int, left: int) -> None:
    composer = Composer(view_of(free_blocks=free, kept_blocks=kept))
    composer.leave_kept()
    assert (composer.free_blocks, composer.kept_blocks) == (left, 0)


@pytest.mark.parametrize(("kept", "starts"), [(4, True), (5, False), (100, False)])
def test_beside_one_row_another_starts_in_what_is_left(kept: int, starts: bool) -> None:
    assert (
        started(waiting_offline=[FRESH], free_blocks=BLOCKS + 4, kept_blocks=kept, offline=TWO[:1]) == starts
    )


def test_a_row_is_restored_in_what_is_left() -> None:
    row = FRESH._replace(restorable=99)
    room = {"free_blocks": BLOCKS + 4, "offline": TWO, "waiting_offline": [row]}
    assert plan_of(kept_blocks=3, **room).restored == ["fresh"]
    assert not plan_of(kept_blocks=4, **room).restored


def test_rows_that_grow_take_none_of_them_and_the_last_one_is_evicted() -> None:
    assert not plan_of(offline=GROWING, free_blocks=3, kept_blocks=1).evicted
    assert plan_of(offline=GROWING, free_blocks=3, kept_blocks=3).evicted == ["row1"]


def test_a_live_request_takes_them_before_a_row_is_evicted() -> None:
    plan = plan_of(
        waiting_online=[LIVE], queued_online=1, offline=TWO, free_blocks=BLOCKS, kept_blocks=BLOCKS
    )
    assert plan.admitted == ["live"]
    assert not plan.evicted


def test_what_live_requests_take_is_not_kept_twice() -> None:
    room = {"free_blocks": 2 * BLOCKS + 2, "kept_blocks": 1, "offline": TWO, "slo": Slo(ttft_ms=1e5)}
    plan = plan_of(waiting_online=[LIVE], queued_online=1, waiting_offline=[FRESH], **room)
    assert "fresh" not in plan.admitted, "with the live one's blocks one is left beside them, and one is kept"


@pytest.mark.parametrize("restorable", [0, 99])
def test_one_row_may_run_in_them_and_the_second_leaves_them(restorable: int) -> None:
    rows = [FRESH._replace(name=name, restorable=restorable) for name in ("one", "two")]
    plan = plan_of(waiting_offline=rows, free_blocks=3 * BLOCKS, kept_blocks=3 * BLOCKS)
    assert [*plan.admitted, *plan.restored] == ["one"]


def test_a_row_that_runs_alone_grows_in_them() -> None:
    alone = GROWING[:1]
    assert plan_of(offline=alone, free_blocks=1, kept_blocks=1).tokens == {"row0": 1}
    prompt = Candidate("row0", 100, 32, blocks=2)
    assert plan_of(offline=[prompt], free_blocks=BLOCKS, kept_blocks=BLOCKS).tokens == {"row0": 100}


def test_beside_a_row_that_runs_alone_none_starts_in_them() -> None:
    assert not started(offline=TWO[:1], waiting_offline=[FRESH], free_blocks=20, kept_blocks=20)


def test_views_are_recorded_with_them() -> None:
    view = view_of(kept_blocks=5)
    assert version_of(view) == VERSION_OF_KEPT
    assert recorded(line_of(view, None, policy="conserve", at=0.0)).view.kept_blocks == 5
    assert version_of(view_of()) < VERSION_OF_KEPT
