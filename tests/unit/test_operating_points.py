"""The sweep over operating points: its order, its table, and where it goes on."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import sweep
from tests.benchmarks.sweep import BUSY, CVS, LENGTHS, SCALES, Cell, cell_of, grid, known, table


def measured(cell: Cell, p99: float) -> dict[str, Any]:
    told = {"ttft_p50": 1.0, "ttft_p99": p99, "tbt_p50": 1.0, "tbt_p99": 1.0, "offline": 0.8}
    return {**sweep.asdict(cell), "policies": {"non-preemptive": told, "conserve": told}}


def test_the_first_cells_are_spread_over_the_grid() -> None:
    cells = grid()
    assert len(set(cells)) == len(cells) == len(BUSY) * len(CVS) * len(LENGTHS) * len(SCALES)
    first = cells[:16]
    for values in ("busy", "cv", "lengths", "scale"):
        assert len({getattr(cell, values) for cell in first}) >= 3
    assert grid() == cells


def test_the_worst_cell_is_the_first_row() -> None:
    cells = [measured(cell, p99) for cell, p99 in zip(grid(), (1.1, 1.7, 1.2), strict=False)]
    lines = list(table(cells))
    assert lines[1].startswith(f"{grid()[1].name:<44}conserve")
    assert "1.70" in lines[1]
    assert "median of 3 cells" in lines[3]
    assert "1.20" in lines[3]


def test_a_sweep_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, asked = tmp_path / "sweep.jsonl", list[Cell]()
    first = measured(grid()[0], 1.0)
    file.write_text(json.dumps(first) + "\n" + json.dumps(measured(grid()[1], 1.0))[:40])
    assert known(file) == [first]

    def measure(cell: Cell) -> dict[str, Any]:
        asked.append(cell)
        return measured(cell, 1.5)

    monkeypatch.setattr(sweep, "measure", measure)
    assert sweep.main(["--cells", "3", "--output", str(file)]) == 0
    assert asked == grid()[1:3]
    assert [cell_of(one) for one in known(file)] == grid()[:3]
    assert "median of 3 cells" in capsys.readouterr().out
