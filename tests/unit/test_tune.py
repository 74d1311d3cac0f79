"""`conserve tune`: the search over promises, its arrivals, the file that `conserve serve --tuned` reads."""

import asyncio
import json
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from msgspec import structs

from conserve.bench import recorded
from conserve.bench.answers import LoadAnswer, RequestEnd
from conserve.bench.bound import Mix
from conserve.bench.machine import BenchMachine
from conserve.bench.measure import Block
from conserve.bench.names import promise_flags
from conserve.bench.promise_search import Tuning, latencies
from conserve.bench.simulated import Simulator
from conserve.bench.slo_search import Promise, RunLatencies, excess, harmed
from conserve.bench.traces import Arrival, Trace
from conserve.cli import found_promises
from conserve.cli.found_promises import Tuned, as_tuned
from conserve.cli.serve_flags import milliseconds
from conserve.cli.tune import blocks_of, conclude, learned_of, profile_of, tune
from conserve.config import Settings
from conserve.engine.runtime.recording import ARRIVALS_BYTES, FULL, LineAppender, arrival_line, arrivals_at
from conserve.engine.section import EngineSection
from conserve.errors import EndpointUnusable, InputError, Overloaded, ProfileMissing, SettingsError
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.book import Book
from conserve.profiles.conserve import ConServeModel
from conserve.profiles.correction import Correction
from conserve.profiles.profile import Profile, ProfileKey
from tests.commands import conserve
from tests.fake_rig import measured_profile
from tests.made_up_blocks import Answered, MadeUp, counted

MACHINE = BenchMachine.demo()
NOW = 1_763_900_000.0
TUNED = Tuned(
    model="a/model",
    promises={"harm": 0.23},
    kept=["p99 TTFT +5%"],
    arrivals="200 requests of the last day",
    expected={"rows_per_s": 2.0, "prompt_tokens_per_s": 900.0, "decode_tokens_per_s": 60.0},
    confirmed=True,
    measured_at=NOW,
    engine_flags=[],
    engine="H100; vllm 1; bfloat16; tp=1",
    profile="1a2b3c",
    measured=None,
)


# What may be harmed


def test_what_may_be_harmed_is_said_for_each_latency() -> None:
    assert list(harmed("p99=5%,mean=10%", "p50=20%")) == [
        Promise("p99", "ttft", 0.05),
        Promise("mean", "ttft", 0.1),
        Promise("p50", "tbt", 0.2),
    ]
    assert [str(one) for one in harmed(None, None)] == ["p99 TTFT +5%", "p99 TBT +5%"]
    assert [str(one) for one in harmed(None, "p99=5%")] == ["p99 TBT +5%"]


@pytest.mark.parametrize("text", ["p99", "p99=5", "p99=60%", "p99=1%", "p98=5%", "", "p99=5%,,"])
def test_other_words_are_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--harm-tbt takes mean, p50, p90, p99 and 5% to 50%"):
        harmed(None, text)


def test_a_median_is_a_median() -> None:
    import numpy as np

    found = RunLatencies(np.array([1.0, 2.0, 9.0]), np.array([5.0]))
    assert found.of(Promise("p50", "ttft", 0.1)) == 2.0
    assert found.of(Promise("p99", "ttft", 0.1)) == 9.0


# The search


class Engine:
    """Live requests are harmed by half of what is promised as harm, and by an SLO by a tenth more than that."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def slower(self, promises: dict[str, Any]) -> float:
        if "harm" in promises:
            return 1 + promises["harm"] / 2
        return max(1.0, float(promises["tbt_slo_ms"]) / 20 * 1.1) if promises else 1.0

    def __call__(
        self,
        machine: BenchMachine,
        policy: str,
        blocks: Iterable[Trace],
        *,
        promises: dict[str, Any],
        **given: Any,
    ) -> Iterator[MadeUp]:
        self.asked.append(promises)
        slower = self.slower(promises)
        rows = 0 if policy == "online-only" else round(10_000 * (slower - 0.9)) + ("harm" in promises)
        for trace in blocks:
            answers = [Answered([one.at_s + slower * (0.1 + 0.02 * n) for n in range(8)]) for one in trace]
            yield MadeUp(0.0, 30.0, answers, counted(0, 0), counted(rows, rows // 10))


def tuning(engine: Engine, *promised: Promise) -> Tuning:
    trace = Trace(name="t", duration_s=30.0, arrivals=tuple(Arrival(float(n), 100, 8) for n in range(20)))
    simulator = Simulator(machine=MACHINE, simulate=engine, block_s=30.0, seed=0)
    mix = Mix.of(MACHINE.rows(100, seed=0), MACHINE.engine)
    return Tuning(simulator=simulator, blocks=[trace], promised=promised, mix=mix, say=lambda sentence: None)


def test_the_largest_promise_that_keeps_what_may_be_harmed_is_found() -> None:
    engine = Engine()
    search = tuning(engine, Promise("p99", "tbt", 0.1))
    found = asyncio.run(search.best())
    assert found.parameter.name == "harm"
    assert 0.15 <= found.promises["harm"] <= 0.2, "a harm of 20 % does 10 %"
    assert found.excess <= 1
    assert found.rows_per_s == max(run.rows_per_s for run in search.runs if run.excess <= 1)
    assert {run.parameter.name for run in search.runs} == {"harm", "SLO"}
    assert engine.asked[0] == {}, "live requests alone, without any promise"


def test_without_a_promise_that_keeps_it_the_nearest_is_told() -> None:
    class Harmful(Engine):
        def slower(self, promises: dict[str, Any]) -> float:
            return 2 + super().slower(promises) if promises else 1.0

    search = tuning(Harmful(), Promise("p99", "tbt", 0.05))
    found = asyncio.run(search.best())
    assert found.excess == min(run.excess for run in search.runs) > 1


def test_a_reduced_value_has_the_harvest_of_its_own_test_run() -> None:
    search = tuning(Engine(), Promise("p99", "tbt", 0.1))
    found = asyncio.run(search.best())
    reduced = asyncio.run(search.measure(replace(found, value=0.7 * found.value)))
    assert reduced.value == 0.7 * found.value
    assert reduced.rows_per_s < found.rows_per_s
    assert reduced.excess < found.excess


def test_live_work_left_behind_is_without_what_the_prefix_cache_had() -> None:
    """A recorded conversation goes on from its cache; computed anew, its late prompts would cost harvested rows."""

    class Late(Engine):
        def __call__(self, *given: Any, **more: Any) -> Iterator[MadeUp]:
            for played in super().__call__(*given, **more):
                yield replace(played, answers=[Answered([99.0]) for _ in played.answers])

    def left_ms(cached: int) -> float:
        search = tuning(Late(), Promise("p99", "tbt", 0.1))
        (trace,) = search.blocks
        recorded = [one._replace(cached_tokens=cached) for one in trace]
        blocks = search.simulator.play(
            "conserve", [replace(trace, arrivals=tuple(recorded))], promises={"harm": 0.1}
        )
        found = search.tried(search.parameters()[0], 0.1, blocks, search.alone)
        in_block = search.mix.rows(found.prompt_tokens_per_s, found.decode_tokens_per_s)
        return 30.0 * (in_block - found.rows_per_s) * search.mix.row_ms

    engine = MACHINE.engine
    assert left_ms(0) == pytest.approx(20 * engine.added_ms(Slice(100, 0)))
    assert left_ms(90) == pytest.approx(20 * engine.added_ms(Slice(10, 90)))


@pytest.mark.parametrize(("kept", "code"), [(True, 0), (False, 1)])
def test_what_the_engine_refuses_is_not_kept(
    kept: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def confirm(settings: Any, wanted: Any, search: Any, found: Any) -> Any:
        return replace(found, value=0.7 * found.value, excess=0.9 if kept else 1.1)

    Book(tmp_path / "profiles").save(measured("a/model"))
    monkeypatch.setattr("conserve.cli.tune.blocks_of", lambda *given: tuning(Engine()).blocks)
    monkeypatch.setattr(
        "conserve.cli.tune.prepare_tuning", lambda *given: tuning(Engine(), Promise("p99", "tbt", 0.1))
    )
    monkeypatch.setattr("conserve.cli.tune.confirm", confirm)
    context = SimpleNamespace(obj=SimpleNamespace(settings=lambda **given: Settings(home=tmp_path)))
    with pytest.raises(typer.Exit) as ended:
        tune(
            context, ["a/model", "-tp", "4"], None, None, None, 1.0, None, "p99=10%",
            simulated_only=False, dry_run=False,
            preset="full", rounds=3, block_s=30.0, seed=0, as_json=False,
        )  # fmt: skip
    said = capsys.readouterr()
    assert ended.value.exit_code == code
    assert ("keeps" in said.out) == kept == bool(list(tmp_path.rglob("tuned/*.json")))
    if kept:
        found = found_promises.read(Settings(home=tmp_path), "a/model")
        key = measured("a/model").key
        assert (found.engine_flags, found.engine, found.profile) == (["-tp", "4"], key.summary, key.digest)
        assert found.measured is not None
        assert found.expected["rows_per_s"] < found.measured["rows_per_s"], "the one is of the reduced value"
    else:
        assert "kept p99 TBT +10% with none of the values tried, from --harm" in said.err


def timed_out(number: int) -> LoadAnswer:
    return replace(complete(number), token_at_s=(number + 0.1,), status=RequestEnd.TIMEOUT)


def complete(number: int) -> LoadAnswer:
    return LoadAnswer(
        index=number,
        due_s=float(number),
        sent_s=float(number),
        ended_s=number + 1.0,
        input_tokens=9,
        token_at_s=tuple(number + 0.1 + 0.02 * n for n in range(5)),
        status=RequestEnd.OK,
    )


def played(*answers: LoadAnswer) -> Block:
    return Block(
        policy="conserve",
        started_s=0.0,
        duration_s=30.0,
        answers=answers,
        offline_tokens=0,
        iterations=1,
        planned=0,
        overruns=0,
    )


@pytest.mark.parametrize("metric", ["ttft", "tbt"])
@pytest.mark.parametrize("failing", [2, 100])
def test_requests_that_fail_keep_no_promise(metric: str, failing: int) -> None:
    whole = played(*map(complete, range(100)))
    partly = played(*map(timed_out, range(failing)), *map(complete, range(failing, 100)))
    mean = [Promise("mean", metric, 0.1)]
    assert excess(latencies([whole]), latencies([whole]), mean) < 1
    assert excess(latencies([partly]), latencies([whole]), mean) == math.inf


@pytest.mark.parametrize(("failing", "kept"), [(1, True), (2, False)])
def test_a_p99_lets_one_of_a_hundred_requests_fail(failing: int, kept: bool) -> None:
    whole = played(*map(complete, range(100)))
    partly = played(*map(timed_out, range(failing)), *map(complete, range(failing, 100)))
    p99 = [Promise("p99", "ttft", 0.1)]
    assert (excess(latencies([partly]), latencies([whole]), p99) <= 1) == kept


def test_requests_that_fail_alone_are_no_reference() -> None:
    alone = latencies([played(*map(timed_out, range(3)), complete(3))])
    with pytest.raises(EndpointUnusable, match="3 of 4 live requests failed with no row beside them"):
        alone.as_reference()
    whole = latencies([played(complete(0))])
    assert whole.as_reference() is whole


def test_promises_are_flags_of_serve() -> None:
    assert promise_flags({"harm": 0.23}) == TUNED.flags == "--harm 23%"
    assert promise_flags({"ttft_ms": 1500.0, "tbt_ms": 92.4}) == "--ttft-slo 1500ms --tbt-slo 92.4ms"


# The profile


def measured(name: str = "a/model", day: int = 1, **key: str) -> Profile:
    """A profile of an engine like that of the demo model, but for these parts of its key."""
    engine = ProfileKey(
        **{
            "model": "m",
            "dtype": "bfloat16",
            "device": "H100",
            "parallelism": "tp=4",
            "engine": "vllm 1",
            **key,
        }
    )
    return measured_profile(name, engine, ConServeModel(MACHINE.model.coefficients), day=day)


def test_the_search_names_its_profile_and_the_others_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest may be of `conserve run`, or of another machine that shares the store."""
    settings = Settings(home=tmp_path)
    book = Book(settings.profiles_folder)
    older, newest = measured(day=1), measured(day=2, device="A10", parallelism="tp=1")
    for one in (older, newest, measured("its/other", day=3, dtype="float16")):
        book.save(one)
    assert profile_of(settings, ["a/model"], None).key == newest.key
    first, second = capsys.readouterr().err.splitlines()
    assert first == (
        f"on the profile {newest.key.digest} of a/model, measured 2026-01-02T00:00:00Z: "
        "A10; vllm 1; bfloat16; tp=1"
    )
    assert second == (
        "an older one is of another engine (device: H100 there, A10 here; parallelism: tp=4 there, tp=1 here); "
        f"take it with --profile {older.key.digest}"
    )
    assert profile_of(settings, ["a/model"], older.key.digest).key == older.key
    assert "H100; vllm 1" in capsys.readouterr().err


def test_the_search_is_on_the_engine_as_it_was_corrected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`conserve serve` plans by the correction too; times without it would be too short by as much."""
    settings, profile = Settings(home=tmp_path), measured()
    book = Book(settings.profiles_folder)
    book.save(profile)
    assert learned_of(settings, profile) is None
    learned = Correction(of=profile.stamp, log_scale=math.log(1.3), seen=5000)
    learned.save(book.correction_path(profile.name, profile.key))
    slower, usual = (BenchMachine.of(profile, one).engine for one in (learned_of(settings, profile), None))
    prompt = Batch.of([Slice(300, 100)])
    assert slower.ms(prompt) == pytest.approx(1.3 * usual.ms(prompt))
    assert capsys.readouterr().err == "as engines have corrected it over 5,000 iterations\n"


def test_a_model_without_a_profile_is_profiled_as_it_is_served(tmp_path: Path) -> None:
    with pytest.raises(ProfileMissing, match=r"run: conserve profile --served a/model -tp 4$"):
        profile_of(Settings(home=tmp_path), ["a/model", "-tp", "4"], None)


@pytest.mark.parametrize("flag", ["--simulated-only", "--dry-run"])
def test_a_search_that_starts_no_server_refuses_flags_of_one(flag: str) -> None:
    done = conserve("tune", "a/model", flag, "--rates", "0.5")
    assert done.returncode == 2
    assert "leave out: --rates 0.5" in done.stderr


# Recorded arrivals


def test_live_requests_of_the_last_day_are_a_trace(tmp_path: Path) -> None:
    lines = [arrival_line(NOW - 10.0 * n, 100 + n, 20) for n in range(60)]
    (tmp_path / "8000.csv").write_bytes(b"\n".join([arrival_line(NOW - 90_000, 1, 1), *lines, b"176390"]))
    (tmp_path / f"8000.csv{FULL}").write_bytes(arrival_line(NOW - 5, 900, 7) + b"\n")
    (trace,) = recorded.read(tmp_path, now=NOW)
    assert (trace.name, len(trace)) == ("the last day", 61)
    assert [one.at_s for one in trace] == sorted(one.at_s for one in trace)
    assert (trace.arrivals[0].at_s, trace.arrivals[0].input_tokens) == (0.0, 159)
    assert Arrival(585.0, 900, 7) in trace.arrivals
    assert trace.duration_s > trace.arrivals[-1].at_s


def test_tokens_found_in_the_prefix_cache_are_read_and_earlier_files_have_none(tmp_path: Path) -> None:
    lines = [arrival_line(NOW - n, 100, 20, 64) for n in range(30)]
    earlier = [b"%.3f,100,20" % (NOW - 100 - n) for n in range(30)]
    (tmp_path / "8000.csv").write_bytes(b"\n".join([*earlier, *lines, b"%.3f,100,20,64,1" % NOW]))
    (trace,) = recorded.read(tmp_path, now=NOW)
    assert [trace.cached(one) for one in trace] == [0] * 30 + [64] * 30
    (shorter, *_) = trace.shortened(0.5)
    assert (shorter.input_tokens, shorter.cached_tokens) == (50, 0)
    assert trace.shortened(0.5).arrivals[-1].cached_tokens == 32


def test_each_engine_has_a_trace_of_its_own(tmp_path: Path) -> None:
    """Two data parallel engines of one server, and one of another that was started later."""
    for name, first, last in (("8000", 0, 120), ("8000-1", 0, 120), ("8001", 60, 120)):
        lines = b"\n".join(arrival_line(NOW - 1200 + 10.0 * n, 100, 20) for n in range(first, last))
        (tmp_path / f"{name}.csv").write_bytes(lines)
    engines = recorded.read(tmp_path, now=NOW)
    assert [len(trace) for trace in engines] == [120, 120, 60]
    assert {trace.name for trace in engines} == {"the last day of 3 engines"}
    assert len({trace.duration_s for trace in engines}) == 1
    assert engines[2].arrivals[0].at_s == 600.0
    blocks = recorded.parts(engines, 100.0, 50)
    assert [len(one) for one in blocks] == [10] * (11 + 11 + 6), "no block has the requests of two engines"


def test_too_few_are_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"recorded 0 live requests .* name a trace with --trace"):
        recorded.read(tmp_path / "none", now=NOW)


def test_requests_of_other_models_are_left_out_and_named(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    lines = b"\n".join(arrival_line(NOW - 10.0 * n, 100, 20) for n in range(60))
    found_promises.arrivals_file(settings, "its/other", 8000).write_bytes(lines)
    folder = found_promises.arrivals_folder(settings, "a/model")
    with pytest.raises(
        InputError, match=r"recorded 0 live requests .* \(there are requests of its-other too\)"
    ):
        recorded.read(folder, now=NOW)
    found_promises.arrivals_file(settings, "a/model", 8000).write_bytes(lines)
    assert [len(trace) for trace in recorded.read(folder, now=NOW)] == [60]


def test_blocks_go_from_the_quietest_to_the_busiest() -> None:
    at_s = [10.0 * block + n / 10 for block in range(20) if block % 4 for n in range(block + 1)]
    trace = Trace(name="t", duration_s=200.0, arrivals=tuple(Arrival(at, 1, 1) for at in at_s))
    found = recorded.parts([trace], 10.0, 5)
    assert [len(one) for one in found] == [4, 8, 12, 16, 20]
    assert len(recorded.parts([trace], 10.0, 50)) == 15, "empty ones are left out"


def test_the_newest_requests_are_in_a_block_however_the_time_divides() -> None:
    """An hour of one request a second, then 50 s of twenty; the first 50 s of the hour are dropped."""
    at_s = [*map(float, range(3600)), *(3600 + n / 20 for n in range(1000))]
    trace = Trace(name="t", duration_s=3650.0, arrivals=tuple(Arrival(at, 1, 1) for at in at_s))
    found = recorded.parts([trace], 60.0, 60)
    assert [len(one) for one in found] == [60] * 59 + [1010]
    assert found[-1].duration_s == 60.0


def test_a_trace_shorter_than_a_block_is_repeated_in_it() -> None:
    """An idle rest would halve the load that the promise is tuned to."""
    trace = Trace(name="t", duration_s=15.0, arrivals=tuple(Arrival(n / 2, 1, 1) for n in range(30)))
    (block,) = recorded.parts([trace], 60.0, 12)
    assert (block.duration_s, [one.at_s for one in block]) == (60.0, [n / 2 for n in range(120)])


class CountedArrivals(tuple[Arrival, ...]):
    """Arrivals that count how often one is looked at."""

    looks = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        CountedArrivals.looks += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self) -> Iterator[Arrival]:
        CountedArrivals.looks += len(self)
        return super().__iter__()


def test_a_day_is_cut_into_minutes_without_looking_at_all_of_it_for_each() -> None:
    day = CountedArrivals(Arrival(at * 28.8, 1, 1) for at in range(3000))
    found = recorded.parts([Trace(name="t", duration_s=86_400.0, arrivals=day)], 60.0, 2000)
    assert sum(map(len, found)) == 3000
    assert CountedArrivals.looks <= 3000 + 1440 * 2 * 12, "a bisection of 3,000 looks at twelve"


@pytest.mark.usefixtures("slow_disk")
def test_a_file_of_arrivals_begins_anew_when_it_is_full(tmp_path: Path) -> None:
    file = tmp_path / "8000.csv"
    recording = LineAppender(file, most_bytes=100, what="arrivals", turns=True)
    for n in range(9):
        recording.add(arrival_line(NOW + n, 10, 5))
    recording.close()
    assert recording.on is False
    kept = (file.with_name(f"8000.csv{FULL}").read_bytes() + file.read_bytes()).splitlines()
    assert all(line.endswith(b",10,5,0") for line in kept)
    assert file.stat().st_size <= 100
    assert len(kept) >= 4


def test_the_folder_of_a_models_arrivals_is_the_one_that_the_page_describes(tmp_path: Path) -> None:
    """`record_arrivals` of a vllm serve of one's own is written there by hand."""
    folder = found_promises.arrivals_folder(Settings(home=tmp_path), "/data/my_models/a.b-1_c/")
    assert folder == tmp_path / "serving" / "arrivals" / "data-my-models-a.b-1-c"


def test_engines_that_share_a_server_write_files_of_their_own(tmp_path: Path) -> None:
    assert arrivals_at(None, 0) is None
    recordings = [arrivals_at(tmp_path / "8000.csv", number) for number in (0, 1)]
    assert [one.path.name for one in recordings if one is not None] == ["8000.csv", "8000-1.csv"]
    for one in recordings:
        assert one is not None
        one.close()
    assert ARRIVALS_BYTES == 64 << 20


def test_four_engines_with_half_a_load_each_are_not_one_with_twice_a_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, gap_s = Settings(home=tmp_path), 2.0
    for number in range(4):
        file = found_promises.arrivals_file(settings, "a/model", 8000 + number)
        file.write_bytes(b"\n".join(arrival_line(time.time() - gap_s * n, 128, 32) for n in range(1, 200)))
    blocks = blocks_of(settings, "a/model", None, None, 1.0, 60.0, MACHINE)
    assert max(map(len, blocks)) <= 31
    assert "of 4 engines" in capsys.readouterr().err
    slower = blocks_of(settings, "a/model", None, 0.1, 1.0, 60.0, MACHINE)
    assert max(map(len, slower)) <= 7


def test_what_the_prefix_cache_had_is_not_computed_in_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts of conversations, of which four tokens in five are those of the turn before."""
    settings = Settings(home=tmp_path)
    file = found_promises.arrivals_file(settings, "a/model", 8000)

    def found(cached: int) -> list[Trace]:
        lines = (arrival_line(time.time() - n, 1500, 8, cached) for n in range(1, 200))
        file.write_bytes(b"\n".join(lines))
        return blocks_of(settings, "a/model", None, None, 1.0, 60.0, MACHINE)

    with pytest.raises(Overloaded):
        found(0)
    assert {block.cached(one) for block in found(1200) for one in block} == {1200}
    assert ", 80% of their prompts' tokens in the prefix cache; online-only" in capsys.readouterr().err


def test_recorded_requests_are_played_at_their_lengths_and_only_longer_ones_cut_to_the_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, context = Settings(home=tmp_path), MACHINE.flags["max_model_len"]
    recorded_lengths = [(context - 100, 100), (300, context - 300)]
    lines = (arrival_line(time.time() - 30 * n, *recorded_lengths[n % 2]) for n in range(1, 60))
    found_promises.arrivals_file(settings, "a/model", 8000).write_bytes(b"\n".join(lines))

    def played(lengths: float) -> set[tuple[int, int]]:
        blocks = blocks_of(settings, "a/model", None, 1 / 60, lengths, 120.0, MACHINE)
        return {(one.input_tokens, one.output_tokens) for block in blocks for one in block}

    assert played(1.0) == {*recorded_lengths}
    assert "cut" not in capsys.readouterr().err
    assert played(1.25) == {(context - 125, 125), (1, context - 1)}
    said = capsys.readouterr().err
    assert "live requests are longer than the engine's context of 2,048 tokens; their prompts are cut" in said


def test_a_trace_that_leaves_nothing_to_harvest_is_refused_with_a_rate(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    with pytest.raises(Overloaded, match=r"give a lower --rate, such as \d"):
        blocks_of(settings, "a/model", "azure_conv_2023_10min", 50.0, 0.25, 10.0, MACHINE)
    assert len(blocks_of(settings, "a/model", "azure_conv_2023_10min", 0.5, 0.125, 30.0, MACHINE)) == 12


# The file


def test_what_was_tuned_is_promised_by_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(home=tmp_path)
    with pytest.raises(InputError, match="nothing was tuned for a/model yet; run: conserve tune a/model"):
        as_tuned(EngineSection(), settings, ["a/model"], given=(None, None, None))
    assert conclude(settings, TUNED, [], keep=True, as_json=False) == 0
    said = capsys.readouterr()
    assert "--harm 23% keeps p99 TTFT +5% (confirmed on the engine)" in said.out
    assert "2.00 rows/s, 7,200 an hour: 900 prompt tokens/s and 60 decode tokens/s" in said.out
    assert "kept for conserve serve a/model --tuned" in said.err
    assert as_tuned(EngineSection(), settings, ["a/model"], given=(None, None, None)) == EngineSection(
        harm=0.23
    )
    assert (
        "(on the engine: H100; vllm 1; bfloat16; tp=1) for p99 TTFT +5%: --harm 23%"
        in capsys.readouterr().err
    )
    with pytest.raises(SettingsError, match="leave out --ttft-slo, --tbt-slo and --harm"):
        as_tuned(EngineSection(), settings, ["a/model"], given=(None, "50ms", None))


def test_what_the_engine_harvested_is_told_beside_what_the_simulation_expects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harvested = {"rows_per_s": 0.5, "prompt_tokens_per_s": 220.0, "decode_tokens_per_s": 15.0}
    conclude(
        Settings(home=tmp_path), structs.replace(TUNED, measured=harvested), [], keep=True, as_json=False
    )
    _, expected, measured = capsys.readouterr().out.splitlines()
    assert expected.startswith("expected beside this traffic, simulated: 2.00 rows/s")
    assert measured == (
        "measured beside its busiest blocks, on the engine: 0.50 rows/s, 1,800 an hour: "
        "220 prompt tokens/s and 15 decode tokens/s"
    )


def test_a_result_that_no_engine_confirmed_is_promised_with_any_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(home=tmp_path)
    found_promises.write(settings, structs.replace(TUNED, confirmed=False, engine_flags=None))
    assert as_tuned(EngineSection(), settings, ["a/model", "-tp", "4"], given=()) == EngineSection(harm=0.23)
    assert "(simulated: H100; vllm 1; bfloat16; tp=1) for" in (said := capsys.readouterr().err)
    assert "warning" not in said


def test_a_promise_that_was_tuned_with_other_flags_is_told_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(home=tmp_path, engine_args="--seed 7")
    flags = ["--seed", "7", "-tp", "4", "--max-model-len", "8192"]
    found = structs.replace(TUNED, engine_flags=flags, engine="H100; vllm 1; bfloat16; tp=4")
    conclude(settings, found, flags[2:], keep=True, as_json=False)
    assert "kept for conserve serve a/model -tp 4 --max-model-len 8192 --tuned: " in capsys.readouterr().err
    alike = ["--max-model-len=8192", "--tensor-parallel-size", "4"]
    assert as_tuned(EngineSection(), settings, ["a/model", *alike], given=()) == EngineSection(harm=0.23)
    said = capsys.readouterr().err
    assert "(on the engine: H100; vllm 1; bfloat16; tp=4) for" in said
    assert "warning" not in said
    assert as_tuned(EngineSection(), settings, ["a/model", "-tp", "2"], given=()) == EngineSection(harm=0.23)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        "warning: it was tuned with other flags of vLLM: --seed 7 -tp 4 --max-model-len 8192; "
        "for the ones given here run: conserve tune a/model -tp 2"
    )


def test_the_promise_of_another_model_whose_file_has_the_same_name_is_not_taken(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    found_promises.write(settings, TUNED)
    with pytest.raises(
        InputError, match="was tuned for a/model, not for a-model; run: conserve tune a-model"
    ):
        as_tuned(EngineSection(), settings, ["a-model"], given=())


def test_a_folder_is_the_same_model_however_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = Settings(home=tmp_path / "home")
    found_promises.write(settings, structs.replace(TUNED, model="./m"))
    assert found_promises.read(settings, "m/").model == "./m"


def test_slos_are_entries_of_the_section_too(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    found = Tuned(
        **{
            **{f: getattr(TUNED, f) for f in TUNED.__struct_fields__},
            "promises": {"ttft_ms": 900.0, "tbt_ms": 80.5},
        }
    )
    found_promises.write(settings, found)
    section = as_tuned(EngineSection(), settings, ["a/model"], given=())
    assert section == EngineSection(ttft_slo_ms=900.0, tbt_slo_ms=80.5)


@pytest.mark.parametrize("tbt_ms", [0.3, 80.0, 2224.8, 12_345.6])
def test_flags_of_what_was_tuned_are_taken_by_serve(tbt_ms: float) -> None:
    promises = {"ttft_ms": 50_000.0, "tbt_ms": tbt_ms}
    found = Tuned(**{**{f: getattr(TUNED, f) for f in TUNED.__struct_fields__}, "promises": promises})
    ttft, tbt = found.flags.split()[1::2]
    assert (milliseconds("--ttft-slo", ttft), milliseconds("--tbt-slo", tbt)) == (50_000.0, tbt_ms)


def test_a_dry_run_keeps_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(home=tmp_path)
    assert conclude(settings, TUNED, [], keep=False, as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["promises"], document["file"]) == ({"harm": 0.23}, None)
    assert document["measured_at"] == "2025-11-23T12:13:20+00:00"
    assert not list(tmp_path.rglob("*.json"))


def test_a_damaged_file_is_said_with_the_command(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    path = found_promises.write(settings, TUNED)
    path.write_text("{}")
    with pytest.raises(InputError, match="run: conserve tune a/model"):
        found_promises.read(settings, "a/model")
