"""The run that `conserve eval run` goes on with, and what it gives up."""

import fcntl
import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

import conserve
from conserve import owners
from conserve.api.job import Job
from conserve.config import load
from conserve.errors import JobRefused, UsageError
from conserve.evals.plan import ModelTarget
from conserve.evals.plan_file import plan_of
from conserve.evals.records import RunState, SuiteRecord
from conserve.nightly import evaluating, evaluation_lock, keeping
from conserve.nightly.current_run import current_run, give_up
from conserve.nightly.evaluation_lock import SIGNATURE, held, locking, take
from conserve.nightly.run_jobs import SUITE, tags_of
from conserve.nightly.running import Asking, overridden, plan_of_file
from conserve.store.books.readings import read_jobs
from conserve.store.files import nights
from tests import commands, nightly_files
from tests.acceptance.aimed import Shot
from tests.commands import Done
from tests.conftest import StartForked
from tests.tiers import in_full

GOOD, NOWHERE = "fake:?tokens=8", "http://127.0.0.1:9"
ENDLESS = "fake:?tokens=8&request_ms=3600000"
ROWS = 6
FIRST_ANSWER = Shot(
    at="conserve.jobs.harvest.recorder:Recorder.write", since="conserve.store.books.journal:count", after=True
)
EACH_ANSWER = {"conserve__jobs__harvest__write_behind__FLUSH_ROWS": 1}
"""Each answer is written at once, with no other, where the next one takes longer than a turn of the loop."""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONSERVE_FAKE", "1")
    return nightly_files.written(tmp_path, rows=ROWS)


def home() -> Path:
    return conserve.open().path


def night(file: Path, *flags: str) -> Done:
    return commands.conserve("eval", "run", str(file), *flags)


def states() -> list[str]:
    """States of the runs as `eval list` and SQL show them."""
    listed = json.loads(commands.conserve("eval", "list", "--json").stdout)[::-1]
    asked = conserve.open().sql("select state from eval_runs order by began_at, run_id").fetchall()
    assert [run["state"] for run in listed] == [state for (state,) in asked]
    return [run["state"] for run in listed]


def test_an_unfinished_run_that_is_too_old_is_given_up(file: Path) -> None:
    settings = conserve.open()._settings
    asking = Asking(file=file, overrides={})
    plan, text = plan_of_file(file)
    old = current_run(settings, asking, plan, text, now=1e9, say=print)
    assert current_run(settings, asking, plan, text, now=1e9 + plan.resume_s, say=print) == old
    new = current_run(settings, asking, plan, text, now=1e9 + plan.resume_s + 1, say=print)
    assert new.id != old.id
    assert keeping.read(home(), old.id).state is RunState.GIVEN_UP
    anew = Asking(file=file, overrides={}, anew=True)
    assert current_run(settings, anew, plan, text, now=2e9, say=print) != new


def test_a_night_at_a_wrong_address_does_not_keep_it(file: Path) -> None:
    wrong = night(file, "--endpoint", NOWHERE)
    assert wrong.returncode == 1, wrong.stderr
    assert states() == ["stopped"]
    assert [job.status for job in conserve.open().jobs()] == ["cancelled"], "no other run answers its rows"
    right = night(file, "--endpoint", GOOD)
    assert right.returncode == 0, right.stderr
    assert "is given up, since the file or the flags have changed and none of its rows was" in right.stderr
    assert "going on with" not in right.stderr
    assert states() == ["given up", "finished"]
    assert [job.status for job in conserve.open().jobs()] == ["cancelled", "completed"]


def second_try(file: Path, monkeypatch: pytest.MonkeyPatch) -> Done:
    """Run a night whose model cannot be reached, and again once the model can."""
    monkeypatch.setenv("CONSERVE_ENDPOINT", NOWHERE)
    assert night(file).returncode == 1
    monkeypatch.setenv("CONSERVE_ENDPOINT", GOOD)
    done = night(file)
    assert done.returncode == 0, done.stderr
    return done


def test_the_same_night_at_an_address_that_answers_again_goes_on(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = second_try(file, monkeypatch)
    assert "going on with" in done.stderr
    assert states() == ["finished"]


def test_a_night_whose_scoring_fails_goes_on_though_its_first_try_reached_no_model(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_try(file, monkeypatch)
    (run,) = keeping.runs(home())
    unscored = tuple(replace(suite, error="scoring failed", scores=()) for suite in run.suites)
    keeping.write(home(), replace(run, state=RunState.FAILED, suites=unscored))
    again = night(file)
    assert "its answers are kept and scored anew" in again.stderr
    assert [job.status for job in conserve.open().jobs()] == ["cancelled", "completed"]
    assert states() == ["finished"]


def test_a_night_with_answers_keeps_its_file_and_flags(file: Path) -> None:
    settings, asking = conserve.open()._settings, Asking(file=file, overrides={"endpoint": GOOD})
    plan, text = plan_of_file(file)
    run = current_run(settings, asking, plan, text, now=1e9, say=print)
    job = conserve.open().submit([{"q": "x"}, {"q": "y"}], prompt="{{ q }}", tags=tags_of(run.id, run.token))
    changed = Asking(file=file, overrides={"endpoint": "fake:"})
    said: list[str] = []
    job.run(endpoint=GOOD, progress=False)
    assert current_run(settings, changed, plan, text, now=1e9 + 1, say=said.append) == run
    assert "begin another with: --new" in said[-1]


def test_a_state_is_running_while_a_process_is_at_it(file: Path) -> None:
    settings, asking = conserve.open()._settings, Asking(file=file, overrides={})
    plan, text = plan_of_file(file)
    current_run(settings, asking, plan, text, now=1e9, say=print)
    with held(home(), plan.name, "queue", print):
        assert not owners.is_dead(nights.signed_by(home(), plan.name))
        assert states() == ["running"]
    assert states() == ["stopped"]
    host, pid, _, nonce = owners.this_process().rsplit(":", 3)
    crashed, elsewhere = f"{host}:{pid}:1.00:{nonce}", f"elsewhere:{pid}:1.00:{nonce}"
    lock = nights.lock_file(home(), plan.name)
    for signed, state in (
        (elsewhere, "running"),
        (crashed, "stopped"),
        ("host 1", "stopped"),
        ("", "stopped"),
    ):
        lock.write_text(signed)
        assert states() == [state]


def test_a_lock_that_is_yet_to_be_signed_is_waited_for(file: Path) -> None:
    """Another process takes it, and signs once this one has looked; before, a crashed one had signed."""
    path = nights.lock_file(home(), "small")
    path.parent.mkdir(parents=True)
    host, pid, _, nonce = owners.this_process().rsplit(":", 3)
    path.write_text(f"{host}:{pid}:1.00:{nonce}")
    other, said = os.open(path, os.O_RDWR), list[str]()
    fcntl.flock(other, fcntl.LOCK_EX)
    signing = iter([lambda: None, lambda: os.pwrite(other, b"elsewhere:7:1.00:0.0".ljust(SIGNATURE), 0)])
    sleep, signed_by = (
        "conserve.nightly.evaluation_lock.time.sleep",
        "conserve.nightly.evaluation_lock.nights.signed_by",
    )
    with patch(sleep, lambda _: next(signing)()), held(home(), "small", "skip", said.append) as hold:
        assert hold == "theirs"
    assert "process 7 on elsewhere" in said[0]
    ends = patch(sleep, lambda _: os.close(other))
    with patch(signed_by, lambda *_: ""), ends, held(home(), "small", "replace", said.append) as hold:
        assert hold == "ours"


def test_one_run_waits_for_another_and_further_ones_are_skipped(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A night whose server is away would gather a process a night."""
    monkeypatch.setenv("CONSERVE_ENDPOINT", GOOD)
    said: list[str] = []
    going = held(home(), "small", "queue", print)
    with going, locking(home(), nights.waiting_file(home(), "small")) as waiting:
        assert take(waiting)
        done = night(file)
        skipped = json.loads(night(file, "--json").stdout)
    assert (done.returncode, done.stdout) == (0, "")
    assert ", and another one waits for it; this one is skipped" in done.stderr
    assert skipped["headline"] == "Skipped: an earlier run is still going."
    nights.lock_file(home(), "small").write_text("elsewhere:7:1.00:0.0")
    first = iter([False])  # the other run ends just after this look
    monkeypatch.setattr(evaluation_lock, "take", lambda lock: next(first, True) and take(lock))
    with held(home(), "small", "queue", said.append) as hold:
        assert hold == "ours"
        assert said[-1].endswith("; this one waits for it, as the file says")
        with locking(home(), nights.waiting_file(home(), "small")) as waiting:
            assert take(waiting), "the next one may wait"


def test_a_run_that_waited_takes_the_file_as_it_is_then(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSERVE_ENDPOINT", GOOD)
    settings, text = conserve.open()._settings, file.read_text()
    for change, found in (("", "small"), ("seed = 7\n", "small"), ("", None)):
        written = f"{change}{text}" if found else text.replace('"small"', '"large"')

        @contextmanager
        def waited(*_: object, written: str = written) -> Iterator[str]:
            file.write_text(written)
            yield "ours"

        monkeypatch.setattr(evaluating, "held", waited)
        file.write_text(text)
        if found is None:
            with pytest.raises(UsageError, match=r"is of 'large' now, while this run waited for 'small'"):
                evaluating.evaluate(settings, Asking(file=file, overrides={}, progress=False), print)
        else:
            run = evaluating.evaluate(settings, Asking(file=file, overrides={}, progress=False), print)
            assert run is not None
            assert run.plan == written


def test_replace_says_what_it_cannot_end(file: Path) -> None:
    path = nights.lock_file(home(), "small")
    path.parent.mkdir(parents=True)
    path.write_text("elsewhere:7:1.00:0.0")
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused = pytest.raises(JobRefused, match="going in process 7 on elsewhere; end it there first")
        with refused, held(home(), "small", "replace", print):
            pytest.fail("held twice")


def test_a_run_is_given_up_whatever_becomes_of_its_jobs(file: Path) -> None:
    settings = conserve.open()._settings
    plan, text = plan_of_file(file)
    run = current_run(settings, Asking(file=file, overrides={}), plan, text, now=1e9, say=print)
    ours, theirs = (
        {"eval": run.id, "eval_token": run.token},
        {"eval": run.id, "eval_token": "another store's"},
    )
    store = conserve.open()
    jobs = {
        name: store.submit([{"q": name}], prompt="{{ q }}", tags=tags)
        for name, tags in {
            "open": ours,
            "done": ours,
            "paused": ours,
            "ended": ours,
            "theirs": theirs,
        }.items()
    }
    jobs["done"].run(endpoint=GOOD, progress=False)
    jobs["paused"].pause()
    began, cancel = iter([1]), Job.cancel

    def ends_just_before(job: Job) -> None:
        if job == jobs["ended"] and next(began, None):
            job.run(endpoint=GOOD, progress=False)
        cancel(job)

    with patch.object(Job, "cancel", ends_just_before):
        give_up(settings, run, "it is old", now=2e9, say=print)
    assert {name: job.status.value for name, job in jobs.items()} == {
        "open": "cancelled", "done": "completed", "paused": "cancelled", "ended": "completed", "theirs": "queued"
    }  # fmt: skip
    assert keeping.read(home(), run.id).state is RunState.GIVEN_UP


ENGINE = 'model = "m"\nengine_args = ["--seed", "1"]'
SERVER = 'model = "m"\nendpoint = "http://a"'
OF_STORE = 'answered_by = "serve"'


@pytest.mark.parametrize(
    ("entries", "flags", "asked"),
    [
        (SERVER, {"model": "x"}, ModelTarget(model="x", endpoint="http://a")),
        (SERVER, {"endpoint": "http://b"}, ModelTarget(model="m", endpoint="http://b")),
        (SERVER, {"model": "x", "endpoint": "http://b"}, ModelTarget(model="x", endpoint="http://b")),
        (ENGINE, {"model": "x"}, ModelTarget(model="x", engine_args=("--seed", "1"))),
        (ENGINE, {"endpoint": "http://b"}, ModelTarget(endpoint="http://b")),
        (OF_STORE, {"endpoint": "http://b"}, ModelTarget(endpoint="http://b")),
    ],
)
def test_a_flag_replaces_what_it_names_alone(
    entries: str, flags: dict[str, str | int], asked: ModelTarget
) -> None:
    plan = plan_of(f"{nightly_files.PLAN}[model]\n{entries}\n")
    assert overridden(plan, flags).targets == (asked,)


def test_a_servers_own_model_is_changed_by_no_flag() -> None:
    plan = plan_of(f"{nightly_files.PLAN}[model]\n{OF_STORE}\n")
    with pytest.raises(UsageError, match="answers with its own model"):
        overridden(plan, {"model": "x"})


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ('endpoint = "localhost:8000"', "model.endpoint: 'localhost:8000' is no address"),
        ('endpoint = "http://a"\nengine_args = ["--seed", "1"]', "model.engine_args are for an engine"),
    ],
)
def test_a_check_finds_an_endpoint_that_cannot_be_asked(file: Path, entries: str, fault: str) -> None:
    file.write_text(f"{file.read_text()}\n[model]\n{entries}\n")
    done = night(file, "--check")
    assert done.returncode == 2
    assert fault in done.stderr


def test_a_check_finds_a_judge_that_cannot_be_asked(tmp_path: Path, file: Path) -> None:
    file = nightly_files.written(tmp_path, suites=["judge"])
    file.write_text(
        file.read_text().replace("[suites.judge.judge]", '[suites.judge.judge]\nendpoint = "localhost"')
    )
    done = night(file, "--check")
    assert done.returncode == 2
    assert "suites.judge.judge.endpoint: 'localhost' is no address" in done.stderr


def test_a_night_whose_server_has_another_model_now_says_how_to_begin_anew(
    file: Path, forked: StartForked
) -> None:
    slow = {"CONSERVE_ENDPOINT": "fake:?tokens=8&model=one&token_ms=30&capacity=1"}
    killed = forked("eval", "run", str(file), shots=[FIRST_ANSWER], constants=EACH_ANSWER, **slow)
    assert commands.ended(killed).returncode == -signal.SIGKILL
    assert [job.done for job in read_jobs(load(), now=0.0)] == [1]
    other = commands.conserve("eval", "run", str(file), CONSERVE_ENDPOINT="fake:?tokens=8&model=other")
    assert other.returncode == 1
    last = other.stderr.splitlines()[-1]
    assert "is bound to one and this run has other; begin another night" in last
    assert last.endswith("conserve eval run FILE --new")
    assert "--rebind" not in other.stderr
    anew = commands.conserve(
        "eval", "run", str(file), "--new", CONSERVE_ENDPOINT="fake:?tokens=8&model=other"
    )
    assert anew.returncode == 0, anew.stderr
    assert states() == ["given up", "finished"]


WRONG = "split_part(r.text, ' ', 1)::int"


def test_answers_of_a_night_that_failed_in_scoring_are_scored_anew(file: Path) -> None:
    right = file.read_text()
    score = next(line for line in right.splitlines() if line.startswith("score"))
    file.write_text(right.replace(score, f'score = "select avg({WRONG}) from results r"'))
    assert night(file, "--endpoint", GOOD).returncode == 1
    assert states() == ["failed"]
    file.write_text(right)
    done = night(file, "--endpoint", GOOD)
    assert done.returncode == 0, done.stderr
    assert "its answers are kept and scored anew" in done.stderr
    assert states() == ["finished"]
    assert [job.progress().succeeded for job in conserve.open().jobs()] == [ROWS]


@pytest.mark.parametrize("other", ["prompt", "id", "later", *in_full("flag", "model", "new")])
def test_a_night_that_failed_in_scoring_is_not_taken_for_another(
    file: Path, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = file.read_text()
    score = next(line for line in right.splitlines() if line.startswith("score"))
    file.write_text(right.replace(score, f'score = "select avg({WRONG}) from results r"'))
    monkeypatch.setenv("CONSERVE_ENDPOINT", GOOD)
    assert night(file).returncode == 1
    changed = {"model": f'{right}\n[model]\nendpoint = "fake:"\n', "later": f'resume = "1s"\n{right}'}
    changed["prompt"] = right.replace("{{ question }}", "{{ question }}?")
    changed["id"] = right.replace("expected", 'id = "question"\nexpected')
    file.write_text(changed.get(other, right))
    if other == "later":
        (run,) = keeping.runs(home())
        keeping.write(home(), replace(run, began_at=run.began_at - 60))
    done = night(file, *{"flag": ["--endpoint", "fake:"], "new": ["--new"]}.get(other, []))
    assert done.returncode == 0, done.stderr
    assert len(conserve.open().jobs()) == 2, "the questions were asked again"
    assert states() == (["finished"] if other in ("prompt", "id") else ["failed", "finished"])


def test_verdicts_of_a_failed_night_are_not_taken_for_those_of_another_judge(
    tmp_path: Path, file: Path
) -> None:
    file = nightly_files.written(tmp_path, suites=["judge"], rows=ROWS)
    right = f"{file.read_text()}model = 'JUDGE'\nendpoint = 'fake:?tokens=8&model=JUDGE'\n"
    file.write_text(f"{right.replace('JUDGE', 'one')}pattern = 'never'\n")
    assert night(file, "--endpoint", GOOD).returncode == 1
    file.write_text(right.replace("JUDGE", "two"))
    done = night(file, "--endpoint", GOOD)
    assert done.returncode == 0, done.stderr
    assert states() == ["finished"]
    asked = conserve.open().sql("select model, count(*) from results group by 1 order by 1").fetchall()
    assert asked == [("fake", ROWS), ("one", ROWS), ("two", ROWS)]


def test_a_night_whose_job_was_paused_goes_on_with_it(file: Path, forked: StartForked) -> None:
    running = forked("eval", "run", str(file), CONSERVE_ENDPOINT=ENDLESS)
    commands.until(lambda: any(job.running for job in read_jobs(load(), now=0.0)), running, every_s=0.05)
    (job,) = conserve.open().jobs()
    job.pause()
    ended = commands.ended(running)
    assert ended.returncode == 1
    assert f"run `conserve resume {job.id}`, then run the evaluation again" in ended.stderr
    job.resume()
    done = commands.conserve("eval", "run", str(file), CONSERVE_ENDPOINT=GOOD)
    assert done.returncode == 0, done.stderr
    assert states() == ["finished"]
    assert [(one.id, one.progress().succeeded) for one in conserve.open().jobs()] == [(job.id, ROWS)]


@pytest.mark.parametrize(
    ("steps", "goes_on"),
    [
        ((), True),
        (("pause",), False),
        (("pause", "resume"), True),
        (("cancel",), False),
        (("run",), False),
        (("run", "retry"), True),
    ],
)
def test_a_failed_night_goes_on_with_jobs_that_were_put_back(
    steps: Sequence[str], goes_on: bool, file: Path
) -> None:
    """The only row of the job fails where it is asked."""
    settings, asking = conserve.open()._settings, Asking(file=file, overrides={})
    plan, text = plan_of_file(file)
    run = current_run(settings, asking, plan, text, now=1e9, say=print)
    tags = {**tags_of(run.id, run.token), SUITE: "sql"}
    job = conserve.open().submit([{"q": "no"}], prompt="{{ q }}", tags=tags)
    failed = SuiteRecord(name="sql", kind="sql", error="it was stopped")
    keeping.write(home(), replace(run, state=RunState.FAILED, suites=(failed,)))
    given = {"run": {"endpoint": "fake:?reject=no", "progress": False}}
    for step in steps:
        getattr(job, step)(**given.get(step, {}))
    assert (current_run(settings, asking, plan, text, now=1e9 + 60, say=print).id == run.id) is goes_on


@pytest.mark.parametrize("override", [False, True])
def test_the_record_of_an_ended_run_has_no_password_and_it_goes_on_with_the_files(
    override: bool, file: Path
) -> None:
    settings, login = conserve.open()._settings, "http://me:sesame@127.0.0.1:9"
    if not override:
        file.write_text(f'{file.read_text()}\n[models.one]\nendpoint = "{login}"\n')
    asking = Asking(file=file, overrides={"endpoint": login} if override else {})
    plan, text = plan_of_file(file)
    run = current_run(settings, asking, plan, text, now=1e9, say=print)
    record = nights.folder_of(home(), run.id) / nights.RECORD
    assert b"sesame" in record.read_bytes(), "a run that was killed goes on with it"
    keeping.write(home(), replace(run, state=RunState.FAILED, suites=()))
    assert b"sesame" not in record.read_bytes()
    assert b"http://***@127.0.0.1:9" in record.read_bytes()
    again = current_run(settings, asking, plan, text, now=1e9 + 60, say=print)
    assert (again.id, again.plan, again.overrides) == (run.id, text, asking.overrides)


@pytest.mark.parametrize("other", ["new", "flag", "later"])
def test_another_night_leaves_no_job_of_a_failed_one_in_the_queue(other: str, file: Path) -> None:
    settings, asking = conserve.open()._settings, Asking(file=file, overrides={})
    plan, text = plan_of_file(file)
    run = current_run(settings, asking, plan, text, now=1e9, say=print)
    tags = {**tags_of(run.id, run.token), SUITE: "sql"}
    jobs = [conserve.open().submit([{"q": q}], prompt="{{ q }}", tags=tags) for q in ("a", "b", "c")]
    jobs[0].run(endpoint=GOOD, progress=False)
    jobs[1].pause()
    failed = SuiteRecord(name="sql", kind="sql", error="it was stopped")
    keeping.write(home(), replace(run, state=RunState.FAILED, suites=(failed,)))
    asked = {"new": replace(asking, anew=True), "flag": replace(asking, overrides={"endpoint": NOWHERE})}
    now, said = 1e9 + (plan.resume_s + 1 if other == "later" else 1), list[str]()
    assert current_run(settings, asked.get(other, asking), plan, text, now=now, say=said.append).id != run.id
    assert [job.status.value for job in jobs] == ["completed", "cancelled", "cancelled"]
    assert said == [f"the open jobs of {run.id}, which failed, are cancelled"]
    assert keeping.read(home(), run.id).state is RunState.FAILED


def test_a_night_without_any_answer_is_asked_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSERVE_ENDPOINT", "fake:?reject=question")
    assert night(file).returncode == 1
    monkeypatch.setenv("CONSERVE_ENDPOINT", GOOD)
    assert night(file).returncode == 0
    assert states() == ["failed", "finished"]


def of_the_same_name(folder: Path) -> Path:
    """Another evaluation of this name, in a folder of its own."""
    folder.mkdir()
    return nightly_files.written(folder, rows=ROWS, suites=("sql", "python"))


def test_a_run_of_another_file_of_this_name_is_not_gone_on_with(file: Path, tmp_path: Path) -> None:
    other, settings = of_the_same_name(tmp_path / "other"), conserve.open()._settings
    asking = Asking(file=file, overrides={})
    run = current_run(settings, asking, *plan_of_file(file), now=1e9, say=print)
    job = conserve.open().submit([{"q": "x"}], prompt="{{ q }}", tags=tags_of(run.id, run.token))
    theirs = Asking(file=other, overrides={})
    for answered in (False, True):
        if answered:
            job.run(endpoint="fake:", progress=False)
        with pytest.raises(
            UsageError, match=f"'small' is the name of a file in {file.parent} too, whose run {run.id}"
        ):
            current_run(settings, theirs, *plan_of_file(other), now=1e9, say=print)
        assert states() == ["stopped"]
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / file.name).write_text(file.read_text())
    again = Asking(file=moved / file.name, overrides={})
    assert current_run(settings, again, *plan_of_file(again.file), now=1e9, say=print).id == run.id, (
        "only its folder moved"
    )


def test_runs_of_two_files_of_one_name_are_said_to_be_one_history(file: Path, tmp_path: Path) -> None:
    assert night(file, "--endpoint", GOOD).returncode == 0
    done = night(of_the_same_name(tmp_path / "other"), "--endpoint", GOOD)
    assert f"the last run of 'small', was of a file in {file.parent}: both are one history" in done.stderr
    assert "both are one history" not in night(tmp_path / "other" / file.name, "--endpoint", GOOD).stderr
