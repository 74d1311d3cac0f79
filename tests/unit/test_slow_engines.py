"""A profile of an engine of any speed: the budget is kept where it can be, stretched with a sentence else."""

import json
import re
import statistics
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import typer

from conserve.cli.profile import measure_profile
from conserve.cli.profile_report import heading, time_table
from conserve.engine.profiling import RESERVE_S, VISITS, conclude, measure
from conserve.errors import ProfilingFailed
from conserve.profiles.affordable import LEAST_FITTED, Costs
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.correction import CorrectedModel
from conserve.profiles.itinerary import Stretch
from conserve.profiles.margin import Residual
from conserve.profiles.points import FITTED, Point, first_points, plan
from conserve.profiles.profile import Profile, read, read_sample
from conserve.profiles.record import Header, Record
from tests.fake_rig import LIMITS, TRUTH, FakeRig

DEFAULT_S = 180.0
TINY_S = 10.0
CHUNK_MS = TRUTH.predict(Batch.of([Slice(2048, 0)]))
SLOWNESS = {name: chunk_ms / CHUNK_MS for name, chunk_ms in
            {"1x": 250.0, "5x": 1_200.0, "30x": 8_000.0, "100x": 25_000.0}.items()}  # fmt: skip
POINTS = plan(LIMITS, seed=0)
OTHERS = [point for point in plan(LIMITS, seed=7) if point.kind != "noise"]


def session(rig: FakeRig, budget_s: float, record: Record) -> list[Stretch]:
    """Measure within a budget; the stretches that were announced."""
    announced: list[Stretch] = []
    measure(rig, POINTS, record, budget_s=budget_s, on_stretch=announced.append, clock=rig.clock)
    return announced


def empty_record() -> Record:
    return Record.open(None, Header("key", "plan"))


class Done(NamedTuple):
    """A whole session, of which tests only read."""

    rig: FakeRig
    record: Record
    announced: list[Stretch]


@cache
def done(engine: str, budget_s: float) -> Done:
    rig, record = FakeRig(slowness=SLOWNESS[engine]), empty_record()
    return Done(rig, record, session(rig, budget_s, record))


def fitted_in(record: Record) -> list[Point]:
    return [point for point in map(Point.parse, record.visits) if point.kind in FITTED]


@pytest.mark.parametrize("budget_s", [DEFAULT_S, TINY_S])
@pytest.mark.parametrize("engine", SLOWNESS)
def test_a_session_ends_with_a_fit_however_slow_the_engine(engine: str, budget_s: float) -> None:
    rig, record, announced = done(engine, budget_s)
    longest_s = max(ms for times in record.ms.values() for ms in times) / 1e3
    usable_s = max(budget_s - RESERVE_S, budget_s / 2)
    if announced:
        (stretch,) = announced
        assert record.seconds < 1.3 * (usable_s + stretch.more_s) + 2 * longest_s
    else:
        assert record.seconds < usable_s + 2 * longest_s
    assert len(fitted_in(record)) >= LEAST_FITTED
    profile = conclude(rig, record)
    model, measured = profile.model(), profile.measured
    assert measured is not None
    times = {point: rig.truth.predict(point.batch) for point in OTHERS}
    off = [abs(model.predict(p.batch) / ms - 1) for p, ms in times.items() if ms <= measured.ms]
    assert statistics.mean(off) < 0.01
    assert max(off) < 0.06


def test_the_default_budget_needs_no_stretch_at_any_of_these_speeds() -> None:
    reached = {}
    for engine in SLOWNESS:
        session = done(engine, DEFAULT_S)
        assert session.announced == []
        reached[engine] = max(point.batch.tokens for point in map(Point.parse, session.record.visits))
    assert reached["1x"] == reached["5x"] == 2048
    assert min(reached.values()) >= 1024


@pytest.mark.parametrize("engine", ["1x", "5x"])
def test_an_engine_that_affords_all_batches_is_measured_in_the_order_of_the_plan(engine: str) -> None:
    record = done(engine, DEFAULT_S).record
    first = list(map(str, first_points(POINTS)))
    names = dict.fromkeys(str(point) for point in POINTS if point.kind != "noise")
    planned = [name for name in names if name not in first]
    visited = [name for name in record.visits if not name.startswith("noise")]
    assert visited[: len(first)] == first
    assert visited[len(first) :] == planned[: len(visited) - len(first)]
    assert len(visited) > 150
    assert sum(len(visits) == VISITS for visits in record.visits.values()) > 0.9 * len(visited)


def test_small_batches_come_first_and_long_ones_only_if_they_are_affordable() -> None:
    rig, record, _ = done("100x", DEFAULT_S)
    first = first_points(POINTS)
    assert [Point.parse(name) for name in record.visits][: len(first)] == first
    assert sum(point.batch.tokens for point in first) < 1024
    spent_s = sum(sum(record.visits[str(point)][0]) for point in first) / 1e3
    assert spent_s < 0.1 * DEFAULT_S
    in_plan_s = max(rig.truth.predict(point.batch) for point in POINTS) / 1e3
    assert max(ms for times in record.ms.values() for ms in times) / 1e3 < 0.5 * in_plan_s


def test_a_stretched_session_says_so_once_and_writes_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = FakeRig(slowness=SLOWNESS["100x"])
    profile, path = measure_profile(rig, tmp_path, budget_s=TINY_S, max_context=None, seed=0, clock=rig.clock)
    assert read(path) == profile
    assert list(tmp_path.iterdir()) == [path]
    said = [line for line in capsys.readouterr().err.splitlines() if "too small" in line]
    (sentence,) = said
    minutes, seconds = re.search(r"about (?:(\d+) min )?([\d.]+) s longer", sentence).groups()  # type: ignore[union-attr]
    announced_s = TINY_S / 2 + 60 * int(minutes or 0) + float(seconds)
    assert profile.seconds == pytest.approx(announced_s, rel=0.2)


@pytest.mark.parametrize("end", ["interrupt_at", "dies_at"])
def test_what_was_measured_is_gone_on_with_under_another_budget(tmp_path: Path, end: str) -> None:
    slowness = SLOWNESS["30x"]
    broken = FakeRig(slowness=slowness, **{end: 25})  # type: ignore[arg-type]
    with pytest.raises((typer.Exit, ProfilingFailed)):
        measure_profile(broken, tmp_path, budget_s=TINY_S, max_context=None, seed=0, clock=broken.clock)
    (partial,) = tmp_path.glob("*.partial")
    kept = partial.read_bytes().splitlines()[1:]
    assert len(kept) > 10
    rig = FakeRig(slowness=slowness)
    profile, _ = measure_profile(rig, tmp_path, budget_s=60, max_context=None, seed=0, clock=rig.clock)
    whole = FakeRig(slowness=slowness)
    measure_profile(whole, tmp_path / "anew", budget_s=60, max_context=None, seed=0, clock=whole.clock)
    assert rig.now_s < whole.now_s - 0.5 * broken.now_s
    assert profile.seconds > rig.now_s - 1
    assert not list(tmp_path.glob("*.partial"))


def test_a_session_is_gone_on_with_where_the_engine_has_less_memory_for_kv(tmp_path: Path) -> None:
    slowness = SLOWNESS["5x"]
    broken = FakeRig(slowness=slowness, interrupt_at=100)
    with pytest.raises(typer.Exit):
        measure_profile(broken, tmp_path, budget_s=60, max_context=None, seed=0, clock=broken.clock)
    (partial,) = tmp_path.glob("*.partial")
    kept = {json.loads(line)[0] for line in partial.read_bytes().splitlines()[1:]}
    less = replace(LIMITS, kv_tokens=8_192)  # too little for some of them, and another plan
    unfit = {name for name in kept if not less.hold(Point.parse(name).slices)}
    assert unfit
    rig = FakeRig(slowness=slowness, limits=less)
    profile, _ = measure_profile(rig, tmp_path, budget_s=60, max_context=None, seed=0, clock=rig.clock)
    assert kept <= {str(read_sample(line)[0]) for line in profile.samples}
    assert rig.now_s < 60 - 0.5 * broken.now_s


def test_a_record_that_used_the_budget_up_on_few_long_batches_is_completed() -> None:
    rig, record = FakeRig(slowness=SLOWNESS["100x"]), empty_record()
    long = [p for p in POINTS if p.kind in FITTED and rig.truth.predict(p.batch) > 12_000][:10]
    for point in long:
        ms = rig.measure(point.slices, 1)
        record.visits[str(point)] = [ms]
        record.seconds += ms[0] / 1e3
    assert record.seconds > 100
    announced = session(rig, 107.0, record)
    assert len(announced) == 1
    assert len(fitted_in(record)) >= LEAST_FITTED
    assert conclude(rig, record).measured is not None


def test_an_engine_with_too_few_different_batches_says_what_to_give_it() -> None:
    limits = replace(LIMITS, tokens=16, requests=1, context=36)
    rig, record = FakeRig(limits=limits), empty_record()
    measure(rig, plan(limits, seed=0), record, budget_s=TINY_S, clock=rig.clock)
    with pytest.raises(ProfilingFailed, match="--max-context"):
        conclude(rig, record)


def test_later_visits_are_given_up_before_half_the_range_and_the_range_before_the_fit() -> None:
    costs = Costs.of(np.linspace(10, 10_000, 1_000), np.ones(1_000), overhead=1.0, noise_s=0.0)

    def reach_ms(left_s: float) -> float:
        return costs.affordable(
            missing=LEAST_FITTED, left_s=left_s, visits=3, fair_ms=5_000, least_ms=1_000
        ).reach_ms

    assert reach_ms(1_000) == np.inf
    assert 5_000 <= reach_ms(400) < 10_000  # three visits
    assert reach_ms(90) < 5_000  # one
    assert reach_ms(0) == 1_000
    reached = [reach_ms(left_s) for left_s in range(1_000)]
    assert min(reached) == 1_000
    stretched = costs.affordable(missing=LEAST_FITTED, left_s=0, visits=3, fair_ms=5_000, least_ms=1_000)
    assert stretched.seconds == pytest.approx(LEAST_FITTED * 0.505, rel=0.02)


@pytest.fixture(scope="module")
def narrow() -> Profile:
    """A profile of the slowest engine within a tiny budget."""
    rig, record, _ = done("100x", TINY_S)
    return conclude(rig, record)


def test_a_profile_says_how_far_it_was_measured(narrow: Profile) -> None:
    measured = narrow.measured
    assert measured is not None
    assert 1_000 < measured.ms < 5_000
    assert measured.tokens < 1024
    (line,) = [line for line in heading(narrow) if line.startswith("measured:")]
    assert f"{measured.tokens:,} of 2,048 tokens" in line
    assert f"{measured.ms:,.0f} ms" in line
    extrapolated = re.findall(r"~([\d.]+)", "\n".join(time_table(narrow)))
    known = re.findall(r"(?<!~)\b(\d+\.\d)\b", "\n".join(time_table(narrow)).replace("~", "~~"))
    assert extrapolated
    assert min(map(float, extrapolated)) > measured.ms
    assert known


def test_times_after_contexts_that_were_not_measured_are_marked(narrow: Profile) -> None:
    """However short they are: what attention costs there was not seen."""
    short = [
        line for line in narrow.samples if all(one.context < 1024 for one in read_sample(line)[0].slices)
    ]
    header, *rows = (re.split(r"\s{2,}", line.strip()) for line in time_table(replace(narrow, samples=short)))
    column = header.index("1024")
    assert all(row[column].startswith("~") for row in rows)
    assert not all(row[1].startswith("~") for row in rows)


def test_few_batches_judge_models_on_all_of_them(narrow: Profile) -> None:
    errors = narrow.models["hygen"].errors
    assert errors is not None
    assert errors.batches == len(narrow.samples) - 1  # without the noise point
    assert narrow.best == "conserve"


def test_a_margin_grows_beyond_the_longest_iteration_and_shrinks_once_one_was_seen() -> None:
    residuals = [Residual(100.0 + n % 100, 1 + n % 10 / 100) for n in range(200)]
    corrected = CorrectedModel(TRUTH, residuals)
    within = corrected.margin(199)
    assert corrected.margin(400) == pytest.approx(1 + 2 * (within - 1), rel=0.02)
    assert corrected.margin(800) == pytest.approx(1 + 3 * (within - 1), rel=0.02)
    batch = Batch.of([Slice(2048, 0)])
    for _ in range(32):
        corrected.observe(batch, TRUTH.predict(batch))
    assert corrected.margin(800) == pytest.approx(within, rel=0.02)
