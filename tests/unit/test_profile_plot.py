"""The picture of a profile: one panel a model, measured against predicted times."""

import sys
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from conserve.errors import ProfileMissing, SettingsError
from conserve.profiles.batch import Slice
from conserve.profiles.conserve import ConServeModel, PaperModel
from conserve.profiles.fit import Errors
from conserve.profiles.plot import plot_profile
from conserve.profiles.points import Point
from conserve.profiles.profile import FittedModel, Profile, write_sample
from tests.fake_rig import KEY

ERRORS = Errors(
    mape=0.0123, p50_error=0, p90_error=0, p99_error=0, bias=0, overrun_share=0, margin=1, batches=2
)
CHUNK, STEP = Slice(100, 0), Slice(1, 50, True)
PROFILE = Profile(
    name="fake-model",
    key=KEY,
    how="measured",
    measured_at="2026-01-01T00:00:00Z",
    seconds=1.0,
    limits=None,
    models={
        "conserve": FittedModel(
            coefficients=ConServeModel.of(1, 0, 0, 0, 0, 0, 0, 10).coefficients, errors=ERRORS
        ),
        "conserve-paper": FittedModel(coefficients=PaperModel.of(2, 0, 0, 10).coefficients),
    },
    samples=[
        write_sample(Point("prefill", (CHUNK,)), [90.0, 100.0, 300.0]),
        write_sample(Point("mixed", (CHUNK, STEP)), [120.0]),
        write_sample(Point("mixed", (STEP, STEP)), [14.0]),
        write_sample(Point("noise", (CHUNK,)), [7.0]),
    ],
)


def test_each_model_has_a_panel_with_the_batches_of_each_kind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved: list[tuple[Figure, Path]] = []

    def savefig(figure: Figure, path: Path, **options: Any) -> None:
        assert options["format"] == "png", "whatever the file's name"
        saved.append((figure, path))

    monkeypatch.setattr(Figure, "savefig", savefig)
    plot_profile(PROFILE, tmp_path / "p.png")
    ((figure, path),) = saved
    assert path == tmp_path / "p.png"
    assert figure.get_suptitle() == "fake-model on CPU, 2 cores"
    panels = figure.get_axes()
    assert [panel.get_title() for panel in panels] == ["conserve, MAPE 1.23%", "conserve-paper"]
    for panel, token_ms in zip(panels, (1, 2), strict=True):
        assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
        assert (panel.get_xlabel(), panel.get_ylabel()) == ("measured (ms)", "predicted (ms)")
        drawn = {
            line.get_label(): [[*map(float, line.get_xdata())], [*map(float, line.get_ydata())]]  # type: ignore[arg-type]
            for line in panel.get_lines()[:-1]
        }
        assert drawn == {
            "prefill": [[100.0], [10.0 + 100 * token_ms]],
            "mixed": [[120.0, 14.0], [10.0 + 101 * token_ms, 10.0 + 2 * token_ms]],
        }
        assert len({line.get_color() for line in panel.get_lines()}) == 3
        equal = panel.get_lines()[-1]
        assert equal.get_xy1() == (1, 1)  # type: ignore[attr-defined]
        assert equal.get_xy2() == (10, 10)  # type: ignore[attr-defined]
        legend = panel.get_legend()
        assert legend is not None
        assert [text.get_text() for text in legend.get_texts()] == ["prefill", "mixed"]


def test_what_cannot_be_drawn_or_written_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(figure: Figure, path: Path, **options: Any) -> None:
        raise OSError(ENOSPC, "No space left")

    monkeypatch.setattr(Figure, "savefig", full)
    path = tmp_path / "p.png"
    with pytest.raises(SettingsError, match=rf"^{path} cannot be written \(No space left\)"):
        plot_profile(PROFILE, path)
    with pytest.raises(ProfileMissing, match="no measurements to plot"):
        plot_profile(replace(PROFILE, samples=[]), path)


def test_without_matplotlib_the_plot_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SettingsError, match=r"^--plot needs matplotlib; run: .*install"):
        plot_profile(PROFILE, tmp_path / "p.png")
