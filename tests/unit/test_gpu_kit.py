"""The kit for a GPU machine: time, parts, results of calls that are cut short, words of the engine."""

import json
import os
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tools.gpu import children, parts, prepare, rehearse, steps, unpack, words
from tools.gpu.budget import STOP_S, Budget
from tools.gpu.contents import ARCHIVES, REQUIREMENTS, kv_bytes_per_token, write_models
from tools.gpu.engines import FULL, KINDS, SMALL
from tools.gpu.measure import measure, parse
from tools.gpu.results import FAILED, LEFT_OUT, Results, state
from tools.gpu.server import HOOKS, Server, StepFailed
from tools.gpu.steps import ABLATION, BENCH, STEPS, Run, Step, bench_s

ROOT = Path(__file__).parents[2]


class Clock:
    """Seconds that move when a step says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    results = Results(folder=tmp_path, rehearsal=True)
    return Run(size=replace(SMALL, patience=1), results=results, models=tmp_path, scratch=tmp_path)


def budget(clock: Clock, limit_s: float) -> Budget:
    return Budget(limit_s=limit_s, began=clock.now, clock=clock)


def on_disk(run: Run) -> dict[str, Any]:
    return json.loads(run.results.path.read_text())


def taking(clock: Clock, seconds: float, given: list[float]) -> Callable[[Run, str, str, float], None]:
    """A step that takes as long, and notes the seconds that it was given."""

    def work(run: Run, step: str, kind: str, limit_s: float) -> None:
        given.append(limit_s)
        clock.now += seconds
        run.results.note(step, kind=kind)

    return work


class TestTime:
    def test_a_step_gets_its_most_or_what_is_left_without_the_time_to_end_a_server(
        self, clock: Clock
    ) -> None:
        of = budget(clock, 100 + STOP_S)
        assert of.allow(least_s=10, most_s=60) == 60
        clock.now += 70
        assert of.allow(least_s=10, most_s=60) == 30

    def test_a_step_that_no_longer_fits_is_left_out_and_says_so(self, run: Run, clock: Clock) -> None:
        given: list[float] = []
        table = {
            "long": Step(taking(clock, 80, given), "default", 10, 90),
            "does not fit": Step(taking(clock, 1, given), "default", 30, 90),
            "short": Step(taking(clock, 5, given), "sync", 15, 90),
        }
        measure(run, list(table), budget(clock, 100 + STOP_S), table)
        found = on_disk(run)["steps"]
        assert found["long"] == {"kind": "default", "took_s": 80}
        assert found["does not fit"] == {"left_out": "it needs 30 s, and 20 s are left"}
        assert found["short"] == {"kind": "sync", "took_s": 5}
        assert given == [90, 20]

    def test_a_rehearsal_has_more_patience(self, run: Run, clock: Clock) -> None:
        given: list[float] = []
        run.size = SMALL
        measure(run, ["a"], budget(clock, 900), {"a": Step(taking(clock, 80, given), "", 10, 90)})
        assert given == [4 * 90]

    def test_every_step_fits_into_a_call_of_its_own(self, clock: Clock) -> None:
        for name, step in STEPS.items():
            assert 0 < step.least_s <= step.most_s, name
            assert (
                budget(clock, prepare.CALL_S).allow(least_s=step.least_s, most_s=step.most_s) == step.most_s
            ), name

    def test_a_call_names_steps_that_exist_and_all_their_least_times_fit(self) -> None:
        named = []
        for call in prepare.calls(2):
            if call.steps:
                known, more = parse(call.steps.split())
                assert not more
                assert known.limit <= prepare.CALL_S
                assert sum(STEPS[name].least_s for name in known.steps) <= known.limit - STOP_S
                named += [(name, known.rates, known.policies) for name in known.steps]
        assert len(named) == len(set(named))
        steps = {name for name, *_ in named}
        of_default = {name for name in STEPS if name.endswith("-default")}
        assert steps >= {name for name in STEPS if name.startswith("serve")} | of_default

    def test_a_comparison_fits_into_the_time_of_its_step(self) -> None:
        assert bench_s(BENCH, FULL) < STEPS["bench-default"].most_s
        assert bench_s(ABLATION, FULL) < STEPS["ablation-default"].most_s

    def test_the_first_call_after_the_parts_brings_the_last_part(self) -> None:
        assert [call.carry for call in prepare.calls(3)][:4] == [".gpu/part1", ".gpu/part2", ".gpu/part3", ""]
        assert not prepare.calls(3)[1].steps
        assert prepare.calls(3)[2].steps

    def test_an_unknown_step_is_refused_by_name(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            parse(["smoke,nonsense"])
        assert "there is no step nonsense" in capsys.readouterr().err


class TestParts:
    def test_no_part_exceeds_its_limit_and_every_archive_is_in_one(self) -> None:
        sizes = {"a": 50, "b": 31, "c": 25, "d": 20, "e": 9, "f": 1}
        shared = parts.share_out(sizes, limit=55)
        assert sorted(name for part in shared for name in part) == sorted(sizes)
        assert all(sum(sizes[name] for name in part) <= 55 for part in shared)
        assert len(shared) == 3

    def test_an_archive_larger_than_a_part_is_named(self) -> None:
        with pytest.raises(parts.PartTooLarge, match="kernels has 56 bytes, more than the 55 of a part"):
            parts.share_out({"kernels": 56, "others": 1}, limit=55)

    def test_a_file_is_in_the_first_archive_that_matches_it(self, tmp_path: Path) -> None:
        for name in (
            "vllm/_C_stable_libtorch.abi3.so",
            "vllm/v1/core.py",
            "duckdb/a.py",
            "_duckdb.so",
            "six.py",
        ):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        assert parts.group(tmp_path, ARCHIVES) == {
            "kernels": ["vllm/_C_stable_libtorch.abi3.so"],
            "attention": [],
            "vllm": ["vllm/v1/core.py"],
            "duckdb": ["_duckdb.so", "duckdb/a.py"],
            "others": ["six.py"],
        }

    def test_a_machine_is_told_which_archives_are_to_come(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        root, site, kit = tmp_path / "root", tmp_path / "site", tmp_path / "kit"
        for folder in (root / ".gpu/part1", site, kit):
            folder.mkdir(parents=True)
        (site / "six.py").write_text("SIX = 6\n")
        (root / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
        listed = root / ".gpu/part1/archives.json"
        listed.write_text(json.dumps(["others.tar.xz", "kernels.tar.xz"]))
        size = parts.pack(root / ".gpu/part1/others.tar.xz", site, ["six.py"])
        assert size == (root / ".gpu/part1/others.tar.xz").stat().st_size
        assert unpack.main(root, kit) == 3
        assert "still to come: kernels.tar.xz" in capsys.readouterr().out
        assert (kit / "site/six.py").read_text() == "SIX = 6\n"

        for file in (listed, root / ".gpu/part1/others.tar.xz"):  # the next call brings the other part alone
            file.unlink()
        parts.pack(root / ".gpu/part1/kernels.tar.xz", site, ["six.py"])
        assert unpack.main(root, kit) == 0

    def test_nothing_is_measured_while_a_part_is_missing(self, tmp_path: Path) -> None:
        root, kit = tmp_path / "root", tmp_path / "kit"
        part = root / ".gpu/part1"
        part.mkdir(parents=True)
        (root / "tools").symlink_to(ROOT / "tools")
        (root / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())

        def call() -> "subprocess.CompletedProcess[str]":
            there = {
                **os.environ,
                "KIT": str(kit),
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            }
            words = [
                "bash",
                "-c",
                ". tools/gpu/install.sh && echo measured with $VLLM_USE_FLASHINFER_SAMPLER",
            ]
            return subprocess.run(words, cwd=root, env=there, capture_output=True, text=True)

        (part / "archives.json").write_text('["others.tar.xz"]')
        first = call()
        assert (first.returncode, first.stdout) == (3, "install: still to come: others.tar.xz\n")
        parts.pack(part / "others.tar.xz", ROOT / "tools/gpu", ["__init__.py"])
        (kit / ".looked").touch()  # there is no GPU to look at
        second = call()
        assert (second.returncode, second.stdout.splitlines()[-1]) == (0, "measured with 0")

    def test_vllm_finds_the_plug_in_in_the_working_tree(self, tmp_path: Path) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        unpack.write_entry_points(project, tmp_path)
        asked = (
            "from importlib.metadata import entry_points\n"
            "print(*[point.value for point in entry_points(group='vllm.general_plugins')])"
        )
        answer = subprocess.run(
            [sys.executable, "-S", "-c", asked],
            env={"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert answer.stdout.split() == [project["entry-points"]["vllm.general_plugins"]["conserve"]]

    def test_every_need_of_the_project_is_brought_or_there(self) -> None:
        found = prepare.wanted(
            "vllm==1\nduckdb==2", '[project]\ndependencies = ["duckdb>=1", "new-one>=3", "httpx"]', ""
        )
        assert found == ["vllm==1", "duckdb==2", "new-one>=3"]
        project, lock = (ROOT / "pyproject.toml").read_text(), (ROOT / "requirements/cpu.lock").read_text()
        assert all("==" in line for line in prepare.wanted(REQUIREMENTS.read_text(), project, lock))

    def test_vllm_is_the_one_that_the_project_supports(self) -> None:
        (cuda,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][
            "cuda"
        ]
        assert cuda in REQUIREMENTS.read_text().split()

    def test_models_have_the_shape_of_the_large_and_the_tokens_of_the_small(self, tmp_path: Path) -> None:
        demo = tmp_path / "demo/any"
        demo.mkdir(parents=True)
        (demo / "tokenizer.json").write_text("{}")
        (demo / "config.json").write_text(
            json.dumps({"vocab_size": 49152, "eos_token_id": 2, "hidden_size": 576})
        )
        write_models(tmp_path / "models", tmp_path / "demo")
        shape = json.loads((tmp_path / "models/llama-8b/config.json").read_text())
        assert (shape["hidden_size"], shape["vocab_size"], shape["eos_token_id"]) == (4096, 49152, 2)
        assert kv_bytes_per_token(shape) == 128 << 10  # Llama 3.1 8B: 32 layers of 8 heads of 128
        assert (tmp_path / "models/qwen-14b/tokenizer.json").exists()

    def test_without_the_demo_model_its_command_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="make demo"):
            write_models(tmp_path / "models", tmp_path)


class TestResults:
    def test_findings_are_on_disk_at_once(self, run: Run) -> None:
        run.results.note("smoke", started_s=3.5)
        assert on_disk(run) == {"rehearsal": True, "setting": {}, "steps": {"smoke": {"started_s": 3.5}}}
        run.results.note("smoke", batch=1)
        assert on_disk(run)["steps"]["smoke"] == {"started_s": 3.5, "batch": 1}
        assert [path.name for path in run.out.iterdir()] == ["results.json"]

    def test_a_step_that_fails_keeps_its_findings_and_ends_no_other(self, run: Run, clock: Clock) -> None:
        def failing(run: Run, step: str, kind: str, limit_s: float) -> None:
            run.results.note(step, started_s=3.5)
            raise StepFailed("conserve serve ended with 2", "its last words")

        def broken(run: Run, step: str, kind: str, limit_s: float) -> None:
            raise KeyError("best")

        table = {
            "failing": Step(failing, "", 1, 2),
            "broken": Step(broken, "", 1, 2),
            "good": Step(taking(clock, 1, []), "", 1, 2),
        }
        measure(run, list(table), budget(clock, 100), table)
        found = on_disk(run)["steps"]
        assert found["failing"] == {
            "started_s": 3.5, "failed": "conserve serve ended with 2", "log": "its last words", "took_s": 0
        }  # fmt: skip
        assert found["broken"]["failed"] == "KeyError: 'best'"
        assert found["good"]["took_s"] == 1

    def test_a_call_that_is_ended_keeps_findings_and_stops_its_server(self, run: Run, clock: Clock) -> None:
        class Running:
            stopped = False

            def stop(self) -> None:
                self.stopped = True

        server = Running()

        def ended(run: Run, step: str, kind: str, limit_s: float) -> None:
            run.server = server  # type: ignore[assignment]
            run.results.note(step, started_s=3.5)
            sys.exit(143)

        table = {"ended": Step(ended, "", 1, 2), "next": Step(taking(clock, 1, []), "", 1, 2)}
        with pytest.raises(SystemExit):
            measure(run, list(table), budget(clock, 100), table)
        found = on_disk(run)["steps"]
        assert found["ended"] == {"started_s": 3.5, "failed": "cut short by SystemExit"}
        assert found["next"] == {"left_out": "the call was ended before it began"}
        assert server.stopped

    def test_an_engine_that_does_not_start_is_not_tried_twice(
        self, run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tried: list[str] = []

        def start(kind: str, *_: object) -> None:
            tried.append(kind)
            raise StepFailed("conserve serve ended with 2")

        monkeypatch.setattr("tools.gpu.steps.Server", start)
        measure(run, ["serve-sync", "offline-sync", "serve-plain"], budget(clock, 600))
        found = on_disk(run)["steps"]
        assert tried == ["sync", "plain"]
        assert found["serve-sync"]["failed"] == "conserve serve ended with 2"
        assert found["offline-sync"]["failed"] == "its server did not start for an earlier step"

    def test_a_kept_server_goes_on_for_the_next_call_and_is_ended_by_it(
        self, run: Run, clock: Clock, tmp_path: Path
    ) -> None:
        def started(run: Run, step: str, kind: str, limit_s: float) -> None:
            one = Server.__new__(Server)
            where = {"log": tmp_path / "s/server-shared.log", "home": tmp_path / "s/home"}
            one._stands(
                kind, run.size, run.out, url="http://127.0.0.1:1", stock_url="http://127.0.0.1:2", **where
            )
            one.log.parent.mkdir()
            one.log.write_text("words of the server")
            one.process, one.stock = (
                children.start(["sleep", "600"], tmp_path / name) for name in ("a", "b")
            )
            run.server, begun[:] = one, [one.process, one.stock]

        begun: list[Any] = []
        run.kept = tmp_path / "kept.json"
        measure(run, ["a"], budget(clock, 100), {"a": Step(started, "shared", 1, 2)}, keep=True)
        assert run.server is None
        assert [one.poll() for one in begun] == [None, None]
        assert (run.out / "server-shared.log").read_text() == "words of the server"

        def used(run: Run, step: str, kind: str, limit_s: float) -> None:
            one = run.serving(kind, step, limit_s)
            assert (one.url, one.stock_url, one.alive) == ("http://127.0.0.1:1", "http://127.0.0.1:2", True)
            assert one.environment["CONSERVE_HOME"] == str(tmp_path / "s/home")
            run.results.note(step, found=True)

        later = Run(size=run.size, results=run.results, models=tmp_path, scratch=tmp_path, kept=run.kept)
        measure(later, ["b"], budget(clock, 100), {"b": Step(used, "shared", 1, 2)})
        assert on_disk(run)["steps"]["b"]["found"]
        assert not any(psutil.pid_exists(one.pid) for one in begun)
        for one in begun:
            one.wait()  # it is psutil that saw their end
        assert not run.kept.exists()

    def test_a_child_that_is_cut_short_keeps_what_it_printed(self) -> None:
        printed = 'noise\n{"started_s": 3.5}\n{broken}\n{"batch": 1}\nlast words'
        assert children.outcome(printed, "") == {"started_s": 3.5, "batch": 1}
        assert children.outcome(printed, "ended after its 60 s") == {
            "started_s": 3.5, "batch": 1, "failed": "ended after its 60 s", "log": "noise\nlast words"
        }  # fmt: skip
        assert children.outcome("last words", "")[FAILED] == "it printed no result"

    def test_a_child_runs_to_its_end(self, tmp_path: Path) -> None:
        log = tmp_path / "child.log"
        good = [sys.executable, "-c", "print('{\"a\": 1}')"]
        assert children.run(good, log, 120) == {"a": 1}
        bad = [sys.executable, "-c", "print('{\"b\": 2}'); raise SystemExit(3)"]
        assert children.run(bad, log, 120) == {
            "b": 2,
            "failed": "exit 3",
            "log": "",
        }  # without the first child's

    @pytest.mark.parametrize(
        ("found", "words"),
        [
            ({"took_s": 1}, "done"),
            ({"took_s": 1, FAILED: "exit 3"}, "failed: exit 3"),
            ({LEFT_OUT: "it needs 30 s"}, "left out: it needs 30 s"),
            ({"started_s": 1}, "cut short"),
        ],
    )
    def test_a_step_is_told_in_a_word(self, found: dict[str, Any], words: str) -> None:
        assert state(found) == words
        assert words in rehearse.table({"smoke": found})

    def test_a_rehearsal_is_complete_if_every_step_has_a_result(self) -> None:
        good: dict[str, dict[str, Any]] = {"a": {"took_s": 1}, "b": {"took_s": 1}}
        assert rehearse.complete(good, ["a", "b"])
        assert not rehearse.complete(good, ["a", "b", "c"])
        assert not rehearse.complete({**good, "b": {FAILED: "exit 3"}}, ["a", "b"])
        assert not rehearse.complete({**good, "b": {LEFT_OUT: "no time"}}, ["a", "b"])


class TestChildren:
    CHILD = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print('{"below": %d}' % below.pid, flush=True)
time.sleep(600)
"""

    @pytest.fixture
    def stubborn(self, tmp_path: Path) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
        """A child that ignores SIGTERM, and its own child in another session."""
        log = tmp_path / "child.log"
        process = children.start([sys.executable, "-c", self.CHILD], log)
        while "below" not in (found := children.outcome(log.read_text(), "")):
            assert process.poll() is None
            time.sleep(0.01)
        yield process, found["below"]
        children.end(process, 0)

    def test_descendants_end_with_a_child_also_in_sessions_of_their_own(
        self, stubborn: tuple["subprocess.Popen[bytes]", int]
    ) -> None:
        process, below = stubborn
        member = psutil.Process(below)
        assert {one.pid for one in children.family(process.pid)} == {process.pid, below}
        children.end(process, patience_s=0)
        assert process.returncode == -9
        while member.is_running() and member.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)  # the time limit of the test is its failure
        assert children.family(process.pid) == []


class Switched:
    """A server that only notes the changes."""

    speed = 10.0

    def __init__(self, preemption: str) -> None:
        self.preemption, self.changes = preemption, []  # type: str, list[Any]

    def report(self) -> dict[str, Any]:
        return {"preemption": {"policy": self.preemption}, "checkpoint": {"policy": "adaptive"}}

    def change(self, wanted: Any) -> None:
        self.changes.append(wanted)

    def queue(self) -> list[Any]:
        return []


class Compared(Switched):
    """A server for comparisons."""

    url, environment = "http://127.0.0.1:1", {}  # type: str, dict[str, str]

    def told(self) -> dict[str, Any]:
        return {}


def hooked(code: str, **variables: str) -> str:
    """Output of Python that starts with the hooks."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{HOOKS}:{ROOT}", **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


class TestHooks:
    def test_iterations_are_noted_behind_what_the_scheduler_learns(self, tmp_path: Path) -> None:
        code = """
from conserve.engine.vllm.iteration import Iteration
from conserve.engine.vllm.scheduling.iterations import Iterations
from conserve.profiles.batch import Batch, Slice
timed = Iterations(None)
for ended in (10.0, 10.5):
    one = Iteration(started=9.5, tokens={"a": 3}, batch=Batch.of([Slice(3, 40)]))
    timed.end(one, ended)
    timed.learn(one)
print(timed.counted)
"""
        assert hooked(code, KIT_NOTES=str(tmp_path / "notes")) == "2\n"
        (written,) = tmp_path.glob("notes.*")
        fields, *lines = map(json.loads, written.read_text().splitlines())
        assert [dict(zip(fields, one, strict=True))["took_ms"] for one in lines] == [500.0, 500.0]
        assert dict(zip(fields, lines[0], strict=True))["batch"][:3] == [1, 3, 40]

    def test_the_warm_up_waits_for_the_stock_server(self, tmp_path: Path) -> None:
        log = tmp_path / "beside.log"
        code = f"""
import asyncio, pathlib, sitecustomize
from types import SimpleNamespace as Has
from conserve.engine.vllm.profiling.learning import learn
embeds = Has(vllm_config=Has(model_config=Has(runner_type="pooling")))
naps = []
async def nap(seconds):
    naps.append(seconds)
    if len(naps) == 3:
        pathlib.Path({str(log)!r}).write_text("INFO Application startup complete.")
sitecustomize.asyncio = Has(sleep=nap)
asyncio.run(learn(embeds, say=print))
print(len(naps), "naps")
"""
        said = hooked(code, KIT_BESIDE=str(log))
        assert "for stock vLLM" in said
        assert said.endswith("3 naps\n")

    def test_without_their_variables_nothing_changes(self) -> None:
        code = "import conserve.engine.vllm.scheduling.iterations as m; print(m.Iterations.learn.__module__)"
        assert hooked(code) == "conserve.engine.vllm.scheduling.iterations\n"


class TestReadings:
    @pytest.fixture
    def reading(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Readings without their seconds."""

        def window(one: Any, wanted: Any, seconds: float) -> dict[str, float]:
            one.change(wanted)
            return {"tokens_per_s": one.speed * len(one.changes), "work_per_s": 5.0}

        monkeypatch.setattr(steps, "window", window)

    def offline(self, run: Run, one: Switched, limit_s: float) -> None:
        run.size = replace(run.size, turns=2)
        run.serving = lambda *_: one  # type: ignore[method-assign,assignment,return-value]
        steps.offline(run, "offline", "default", limit_s)

    @pytest.mark.usefixtures("reading")
    def test_settings_take_turns_and_the_first_one_comes_back(self, run: Run) -> None:
        one = Switched("prompt")
        self.offline(run, one, 600)
        on, off = {"preemption": "prompt"}, {"preemption": "off"}
        assert one.changes == [on, off, on, off, {"preemption": "prompt", "checkpoint": "on"}]
        assert on_disk(run)["steps"]["offline"]["tokens_per_s"] == {"conserve": 20.0, "conserve/off": 30.0}

    @pytest.mark.usefixtures("reading")
    def test_an_engine_without_preemption_has_one_setting(self, run: Run) -> None:
        one = Switched("off")
        self.offline(run, one, 600)
        assert on_disk(run)["steps"]["offline"]["tokens_per_s"].keys() == {"conserve/off"}

    @pytest.mark.usefixtures("reading")
    def test_a_reading_without_rows_is_no_result(self, run: Run) -> None:
        one = Switched("prompt")
        one.speed = 0.0
        with pytest.raises(StepFailed, match="no row was computed"):
            self.offline(run, one, 600)

    @pytest.mark.usefixtures("reading")
    def test_without_time_for_a_reading_the_step_fails_and_its_setting_comes_back(self, run: Run) -> None:
        one = Switched("prompt")
        with pytest.raises(StepFailed, match="before every setting had a reading"):
            self.offline(run, one, 0)
        assert one.changes == [{"preemption": "prompt", "checkpoint": "on"}]


class TestComparisons:
    @pytest.fixture
    def asked(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        """Command lines of `conserve bench`, which leaves one file and succeeds at one request per second alone."""
        asked: list[list[str]] = []

        def bench(command: list[str], log: Path, limit_s: float, environment: Any) -> dict[str, Any]:
            asked.append(command)
            folder = Path(command[command.index("-o") + 1])
            folder.mkdir()
            (folder / "blocks.parquet").write_text("raw")
            return (
                {"policies": {}}
                if "1,0.5,256,16" in command
                else {"policies": {}, FAILED: "exit 1", "log": "why"}
            )

        monkeypatch.setattr(children, "run", bench)
        monkeypatch.setattr(Run, "serving", lambda *_: Compared("prompt"))
        return asked

    def test_each_rate_leaves_an_archive_of_its_raw_numbers(self, run: Run, asked: list[list[str]]) -> None:
        run.size, run.scratch = replace(run.size, rates=(1.0,)), run.out / "scratch"
        run.scratch.mkdir()
        steps.ablation(run, "ablation-default", "default", 600)
        assert "online-only/planned,conserve,conserve/recompute,conserve/off,conserve/never" in asked[0]
        with tarfile.open(run.out / "ablation-default-1.tar.gz") as tar:
            assert "ablation-default-1/blocks.parquet" in tar.getnames()
        assert on_disk(run)["steps"]["ablation-default"]["at 1/s"] == {"policies": {}}

    def test_a_comparison_that_fails_keeps_its_findings(self, run: Run, asked: list[list[str]]) -> None:
        run.size = replace(run.size, rates=(1.0, 2.0))
        with pytest.raises(StepFailed, match="conserve bench: exit 1"):
            steps.bench(run, "bench-default", "default", 600)
        found = on_disk(run)["steps"]["bench-default"]
        assert found["at 1/s"] == {"policies": {}}
        assert found["at 2/s"]["failed"] == "exit 1"
        assert (run.out / "bench-default-2.tar.gz").exists()

    def test_a_rate_that_no_longer_fits_is_left_out(self, run: Run, asked: list[list[str]]) -> None:
        steps.bench(run, "bench-default", "default", 5)
        assert not asked
        found = on_disk(run)["steps"]["bench-default"]
        assert "are left" in found["at 2/s"]["left_out"]
        assert state(found) == "left out: no rate fits"


REPORT: dict[str, Any] = {
    "version": "0.9", "policy": "conserve", "iterations": 90, "planned": 80, "overruns": 1, "busy_s": 8.0,
    "identity": "llama", "alone": None, "latency_model": None, "offline": {"tokens": 5000, "work": 900.0},
    "preemption": {"policy": "just-enough", "why_off": None, "rows_go_on": True, "iterations_left": 7,
                   "abandoned": 1, "rows": 30, "layers_run": 100, "tokens_redone": 4,
                   "tokens_wasted": 1.5, "live_tokens_recomputed": 0, "reaction_ms": {"p50": 1.0, "p99": 2.5}},
    "checkpoint": {"policy": "adaptive", "tokens_saved": 3200, "blocks_saved": 200,
                   "block_ms": {"to_host": 2.0, "to_device": 1.0}},
}  # fmt: skip


class TestWords:
    def test_the_engine_says_of_itself(self) -> None:
        told = words.told(REPORT, f"INFO [worker] {words.V2_LINE}", "0.32.0")
        assert told["versions"] == {"conserve": "0.9", "vllm": "0.32.0"}
        assert (told["policy"], told["runner"]) == ("conserve", "V2")
        assert told["preemption"] == REPORT["preemption"]
        assert told["checkpoint"]["tokens_saved"] == 3200
        assert told["checkpoint"]["why_off"] is None

    def test_an_engine_that_says_nothing_hides_nothing(self) -> None:
        told = words.told({}, "")
        assert told["runner"] is None
        assert set(told["preemption"].values()) == {None}
        assert told.keys() == words.told(REPORT, "x").keys()

    def test_an_engine_without_vllms_line_has_the_first_runner(self) -> None:
        assert words.runner("INFO nothing") == "V1"

    def test_lines_that_name_parts_are_kept_once(self) -> None:
        log = (
            "$ conserve serve --enforce-eager backend\n"
            '{"graph": 1}\n'
            "(Worker pid=1) INFO 11-22 10:00:00 [cuda.py:1] Using FlashAttention backend\n"
            "(Worker pid=2) INFO 11-22 10:00:01 [cuda.py:1] Using FlashAttention backend\n"
            "GET /health 200\n"
        )
        assert words.notable(log) == ["[cuda.py:1] Using FlashAttention backend"]

    def test_counts_are_those_between_two_reports(self) -> None:
        before = {"preemption": {**REPORT["preemption"], "iterations_left": 2, "rows": 10}}
        found = words.counted(before, REPORT)
        assert (found["iterations_left"], found["rows"], found["live_tokens_recomputed"]) == (5, 20, 0)
        assert found["reaction_ms"] == {"p50": 1.0, "p99": 2.5}
        assert found["rows_go_on"] is True
        assert "policy" not in found

    def test_a_reading_is_a_rate(self) -> None:
        before = {**REPORT, "iterations": 50, "busy_s": 7.0, "offline": {"tokens": 1000}, "checkpoint": {}}
        assert words.reading(before, REPORT, 2.0) == {
            "seconds": 2.0, "tokens_per_s": 2000.0, "work_per_s": 450.0, "iterations_per_s": 20.0, "busy": 0.5,
            "tokens_saved_per_s": 1600.0, "copying": 0.2,
        }  # fmt: skip

    def test_settings_are_compared_by_their_medians(self) -> None:
        first = [{"tokens_per_s": tokens, "work_per_s": 200.0} for tokens in (90.0, 100.0, 500.0)]
        readings = {"a": first, "b": [{"tokens_per_s": 97.0, "work_per_s": 198.0}], "c": []}
        assert words.compared(readings) == {
            "tokens_per_s": {"a": 100.0, "b": 97.0}, "tokens_ratio": {"a": 1.0, "b": 0.97},
            "work_per_s": {"a": 200.0, "b": 198.0}, "work_ratio": {"a": 1.0, "b": 0.99},
        }  # fmt: skip
        assert words.compared({"a": []}) == {
            "tokens_per_s": {},
            "tokens_ratio": {},
            "work_per_s": {},
            "work_ratio": {},
        }

    @pytest.mark.parametrize(
        ("copy_ms", "products_ms", "both_ms", "share"),
        [
            (10, 40, 50, 0.0),
            (10, 40, 40, 1.0),
            (10, 40, 45, 0.5),
            (10, 40, 39, 1.0),
            (10, 40, 55, 0.0),
            (0, 4, 4, 0.0),
        ],
    )
    def test_the_hidden_share_of_a_copy(
        self, copy_ms: float, products_ms: float, both_ms: float, share: float
    ) -> None:
        assert words.hidden(copy_ms, products_ms, both_ms) == share

    def test_engines_differ_in_flags_and_environment_and_a_cpu_has_no_second_runner(self) -> None:
        assert KINDS["eager-v1"].flags == KINDS["eager-v2"].flags
        assert FULL.environment("eager-v1") != FULL.environment("eager-v2")
        assert SMALL.environment("eager-v2") == {}


def test_the_page_names_every_step_and_every_engine() -> None:
    page = (ROOT / "docs/gpu/README.md").read_text()
    for name, step in STEPS.items():
        assert (
            f"| `{name.removesuffix(step.kind) + 'X' if step.kind else name}` |" in page
            or f"| `{name}` |" in page
        )
    assert all(f"| `{kind}` |" in page for kind in KINDS)
