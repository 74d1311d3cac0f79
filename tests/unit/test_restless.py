"""Changes of the machine's own speed are told apart from what policies do."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conserve.bench.answers import LoadAnswer
from conserve.bench.measure import Block, compare
from conserve.bench.pages import report, sweep_report
from conserve.bench.restless import LEAST_GAPS, StepTimes, gaps_alone_ms, step_times
from conserve.bench.sweep import CellLedger
from conserve.cli.sweep import conclude
from tests.unit.test_bench import answer, block, failed
from tests.unit.test_operating_points import PLAN, told


def steps_of(step_ms: float, *, policy: str = "online-only", gaps: int = 2 * LEAST_GAPS) -> Block:
    """A block of one request alone with steps of one length, and of two at once whose steps are five times that."""
    others = [answer(20.0, 5 * step_ms, due_s=1e3, tokens=gaps + 1) for _ in range(2)]
    return block(policy, [alone(step_ms, gaps), *map(whole, others)])


def alone(step_ms: float, gaps: int) -> LoadAnswer:
    """The answer to a request, of so many steps."""
    return whole(answer(20.0, step_ms, tokens=gaps + 1))


def whole(one: LoadAnswer) -> LoadAnswer:
    """The answer, ended with its last token."""
    return replace(one, ended_s=one.token_at_s[-1])


def test_steps_of_the_slowest_block_are_compared_with_the_quickest() -> None:
    found = step_times([steps_of(10.0), steps_of(13.0), steps_of(12.0)])
    assert found == pytest.approx((10.0, 13.0))
    assert found is not None
    assert found.times == pytest.approx(1.3)
    assert found.restless


@pytest.mark.parametrize(("times", "restless"), [(1.0, False), (1.09, False), (1.11, True)])
def test_a_machine_is_restless_by_more_than_a_tenth(times: float, restless: bool) -> None:
    assert StepTimes(8.0, 8.0 * times).restless is restless


@pytest.mark.parametrize("gaps", [0, LEAST_GAPS - 1])
def test_a_block_of_few_tokens_tells_nothing(gaps: int) -> None:
    few = block("online-only", [alone(99.0, gaps)])
    assert step_times([steps_of(10.0), few]) is None
    assert step_times([steps_of(10.0), few, steps_of(10.0)]) == pytest.approx((10.0, 10.0))


def test_a_step_counts_while_no_other_request_is_in_flight() -> None:
    first = whole(answer(100.0, 10.0, tokens=11))  # tokens at 100, 110 to 200 ms
    second = replace(whole(answer(40.0, 7.0, due_s=0.155, tokens=3)), sent_s=0.155)  # at 195, 202 and 209
    found = gaps_alone_ms([second, first])
    assert sorted(found) == pytest.approx([7.0, 10.0, 10.0, 10.0, 10.0, 10.0])


def test_a_request_that_failed_was_in_flight_too() -> None:
    first = whole(answer(100.0, 10.0, tokens=11))
    lost = replace(failed(0.0), sent_s=0.0, ended_s=0.145, token_at_s=())
    assert len(gaps_alone_ms([first, lost])) == 5
    assert not len(gaps_alone_ms([]))


def test_as_many_tokens_as_are_needed_are_enough() -> None:
    enough = block("online-only", [alone(15.0, LEAST_GAPS)])
    assert step_times([steps_of(10.0), enough]) == pytest.approx((10.0, 15.0))


def test_only_blocks_without_rows_are_looked_at() -> None:
    blocks = [
        steps_of(10.0),
        steps_of(30.0, policy="conserve"),
        steps_of(10.5),
        steps_of(10.0, policy="conserve"),
    ]
    comparison = compare(blocks)
    assert comparison.steps == pytest.approx((10.0, 10.5))
    assert report.warnings(comparison) == []
    assert comparison.document()["steps"] == pytest.approx(
        {"quickest_ms": 10.0, "slowest_ms": 10.5, "times": 1.05}
    )


def test_a_comparison_says_that_the_machine_changed() -> None:
    blocks = [steps_of(8.0), steps_of(11.0, policy="conserve"), steps_of(12.0)]
    assert report.warnings(compare(blocks)) == [
        "The machine's own speed changed: without rows the decode step of a live request alone took 8 ms in one "
        "block and 12 ms in another (1.50 times). Ratios below that may be the machine's; more rounds (--rounds) "
        "even it out."
    ]


def cells_with(*times: float | None) -> list[dict[str, Any]]:
    """Measured cells whose step times differ so many times; None for a cell of an older sweep."""
    cells = [told(cell, 1.2) for cell in PLAN.wanted()]
    for one, value in zip(cells, times, strict=True):
        if value is not None:
            one["steps"] = StepTimes(8.0, 8.0 * value).document()
    return cells


def test_a_sweep_counts_the_cells_in_which_it_changed() -> None:
    assert sweep_report.machine(cells_with(1.05, None, 1.0, 1.02)) is None
    said = sweep_report.machine(cells_with(1.3, None, 1.05, 1.2))
    assert said is not None
    assert said.startswith("In 2 of 4 cells the machine's own speed changed")
    assert "up to 1.30 times as long" in said


@pytest.mark.parametrize("simulated", [False, True])
def test_the_end_of_a_sweep_says_so_unless_its_time_is_made_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], simulated: bool
) -> None:
    ledger = CellLedger.open(tmp_path / "cells.jsonl", replace(PLAN, simulated=simulated))
    for one in cells_with(1.3, None, 1.05, 1.2):
        ledger.keep(one)
    assert conclude(ledger, tmp_path, as_json=False) == 0
    said = "In 2 of 4 cells the machine's own speed changed"
    assert (said in capsys.readouterr().err) is not simulated
    assert (said in (tmp_path / "page.html").read_text().replace("&#39;", "'")) is not simulated
    assert ("machine" in json.loads((tmp_path / "sweep.json").read_text())["design"]) is not simulated
