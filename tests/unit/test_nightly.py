"""`conserve eval` on the fake endpoint: scores, verdicts, views, reports and names of whole runs."""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

import conserve
from conserve.config import load
from conserve.errors import SettingsError, StoreDamaged, UsageError
from conserve.evals.outcome import Item
from conserve.evals.plan_file import plan_of
from conserve.evals.records import RunRecord, RunState, SuiteRecord
from conserve.nightly import keeping
from conserve.nightly.evaluating import remove_outdated
from conserve.nightly.evaluation_lock import held
from conserve.nightly.items import rows_of
from conserve.nightly.report.document import against_of, document
from conserve.nightly.report.forms import render, text_in_form
from conserve.nightly.samples import sample
from conserve.store.books.readings import JobReading, read_jobs
from tests import commands, nightly_files
from tests.commands import Done
from tests.conftest import StartForked
from tests.tiers import in_full

GOOD, BAD = "fake:?tokens=8", "fake:?tokens=1"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONSERVE_FAKE", "1")
    monkeypatch.setenv("CONSERVE_ENDPOINT", GOOD)
    return nightly_files.written(tmp_path, rows=120, top="worse.effect = 0.1")


def night(file: Path, *more: str, endpoint: str = GOOD) -> Done:
    return commands.conserve("eval", "run", str(file), *more, CONSERVE_ENDPOINT=endpoint)


def home() -> Path:
    return conserve.open().path


def test_all_kinds_of_suites_have_scores(tmp_path: Path, file: Path) -> None:
    file = nightly_files.written(tmp_path, suites=list(nightly_files.SUITES), rows=12)
    done = night(file)
    assert done.returncode == 0, done.stderr
    assert "60 of 60" not in done.stderr
    assert "12 of 12" in done.stderr, "the judge asks after the others"
    (run,) = keeping.runs(home())
    assert run.state is RunState.FINISHED
    assert [suite.name for suite in run.suites] == list(nightly_files.SUITES)
    by_suite = {suite.name: {score.metric: score for score in suite.scores} for suite in run.suites}
    assert by_suite["sql"]["score"].items == 12
    assert by_suite["python"]["length"].mean == pytest.approx(0.8)
    assert by_suite["python"]["hit"].items == 24
    assert by_suite["schema"]["valid"].mean == 0.0
    assert by_suite["schema"]["valid"].items == 5
    assert 0 < by_suite["judge"]["score"].mean < 1
    store = conserve.open()
    (origin,) = store.sql("select distinct engine, model from results").fetchall()
    assert {(suite.facts["engine"], suite.facts["served_model"]) for suite in run.suites} == {origin}
    asked = store.sql("select * from eval_items where suite = 'sql' order by item::int").fetchall()
    assert len(asked) == 12
    hits = store.sql(
        "select avg((contains(answer, expected))::int) from eval_items where suite = 'sql'"
    ).fetchall()
    assert hits[0][0] == by_suite["sql"]["score"].mean


def test_a_worse_night_is_found_and_an_equal_one_passes(tmp_path: Path, file: Path) -> None:
    assert night(file).returncode == 0
    assert commands.conserve("eval", "name", "last", "baseline").returncode == 0
    assert night(file).returncode == 0
    equal = commands.conserve("eval", "gate", "last", "--against", "baseline")
    assert equal.returncode == 0, equal.stdout
    assert "No worse than" in equal.stdout
    assert night(file, endpoint=BAD).returncode == 0
    worse = commands.conserve("eval", "gate", "last", "--against", "baseline", "--fail-on", "regression")
    assert worse.returncode == 6
    assert "endpoint differs (sql)" in worse.stderr
    assert commands.conserve("eval", "gate", "--fail-on", "never").returncode == 0
    compared = json.loads(commands.conserve("eval", "compare", "baseline", "last", "--json").stdout)
    (suite,) = compared["comparison"]["suites"]
    assert suite["verdict"] == "worse"
    assert suite["fell"] > 0
    assert suite["rose"] == 0
    fell = [flip for flip in compared["flips"] if flip["after"] < flip["before"]]
    assert len(fell) == min(100, suite["fell"])
    assert all(len(flip["after_answer"].split()) == 1 for flip in fell)
    flips = conserve.open().sql("select * from eval_items where flip is not null and before_run is not null")
    last = keeping.resolve(home(), "last")
    assert {(row[0], row[-1]) for row in flips.fetchall()} == {(last.id, "fell")}
    reports_agree(tmp_path)


def test_what_a_digest_is_of_is_said(tmp_path: Path) -> None:
    file = nightly_files.written(tmp_path, rows=6)
    assert night(file).returncode == 0
    file.write_text(file.read_text().replace("{{ question }}", "{{ question }}?"))
    assert night(file).returncode == 0
    asked = commands.conserve("eval", "gate", "last", "--against", "previous")
    assert "task (prompt, messages or parameters) differs (sql)" in asked.stderr


def reports_agree(folder: Path) -> None:
    names = {form: folder / f"out.{form}" for form in ("html", "markdown", "junit")}
    flags = [word for form, path in names.items() for word in (f"--{form}", str(path))]
    done = commands.conserve("eval", "report", "last", "--against", "baseline", *flags, "--json")
    found = json.loads(done.stdout)
    page = names["html"].read_text()
    assert found["headline"].startswith("Worse than")
    assert found["headline"] in page
    assert page.count("<details>") == len(found["flips"])
    assert "<svg" in page
    assert "http" not in page.split("<style>")[1].split("</style>")[0], "self-contained"
    assert found["headline"] in names["markdown"].read_text()
    tree = ElementTree.fromstring(names["junit"].read_text())
    assert tree.attrib["failures"] == "1"


RIGHT, WRONG = [1.0] * 45 + [0.0] * 15, [1.0] * 25 + [0.0] * 35


def gate(*words: str) -> Done:
    return commands.conserve("eval", "gate", "last", *words)


def test_a_night_that_has_not_ended_is_not_judged_by_the_one_before(file: Path) -> None:
    """A pipeline runs `eval run`, which fails, and then the gate."""
    before = nightly_files.kept(home(), RIGHT, began_at=1e9)
    nightly_files.kept(home(), RIGHT, began_at=1e9 + 86_400)
    assert gate("--against", before.id).returncode == 0
    assert night(file, endpoint="http://127.0.0.1:9").returncode == 1
    begun = keeping.runs(home())[-1]
    for more in ((), ("--against", before.id), ("--against", "nonesuch"), ("--json",)):
        done = gate(*more)
        assert done.returncode == 7, done.stdout
        assert "it has not ended; go on with it" in done.stdout
        assert begun.id in done.stdout or more == ("--json",)
    assert gate("--fail-on", "never").returncode == 0
    assert night(file).returncode == 0
    assert "has not ended" not in gate().stdout


def test_a_first_night_that_has_not_ended_cannot_be_told(file: Path) -> None:
    assert gate().returncode == 2, "no night was begun"
    assert night(file, endpoint="http://127.0.0.1:9").returncode == 1
    done = gate()
    assert done.returncode == 7, done.stderr
    assert "it has not ended; go on with it" in done.stdout
    assert json.loads(gate("--json").stdout)["comparison"] is None


def test_too_few_items_cannot_tell() -> None:
    nightly_files.kept(home(), [1.0] * 4, began_at=1e9)
    first = gate()
    assert first.returncode == 7
    assert "nothing to compare with" in first.stdout
    nightly_files.kept(home(), [1.0] * 4, began_at=1e9 + 86_400)
    second = gate("--against", "previous")
    assert second.returncode == 7
    assert "needed for this effect" in second.stdout


def test_a_lasting_decline_is_found_in_the_history() -> None:
    runs = [
        nightly_files.kept(home(), scores, began_at=1e9 + 86_400 * night)
        for night, scores in enumerate([RIGHT] * 6 + [WRONG] * 4)
    ]
    assert gate("--against", "previous").returncode == 0, "yesterday was as bad"
    history = gate("--against", "history")
    assert history.returncode == 6
    assert f"since {runs[6].id}" in history.stderr


def many_nights(facts: Sequence[Mapping[str, str]]) -> list[RunRecord]:
    """Nights with these facts, the last four of them worse."""
    return [
        nightly_files.kept(
            home(), RIGHT if night < len(facts) - 4 else WRONG, began_at=1e9 + 86_400 * night, facts=one
        )
        for night, one in enumerate(facts)
    ]


@pytest.mark.parametrize(
    "fact",
    [
        "data",
        "task gsm8k",
        "params",
        "judge_endpoint",
        *in_full("scorer", "judge", "limit", "epochs", "dataset"),
    ],
)
def test_other_questions_begin_a_history_anew(fact: str, tmp_path: Path) -> None:
    runs = many_nights([{fact: "1"}] * 6 + [{fact: "2"}] * 4)
    done = gate("--against", "history")
    assert done.returncode == 0, done.stdout
    assert f"sql: its history begins with {runs[6].id}" in done.stderr
    page = tmp_path / "page.html"
    report = commands.conserve("eval", "report", "--html", str(page), "--json")
    assert f"Since {runs[6].id}" in page.read_text()
    (night,) = json.loads(report.stdout)["nights"]
    assert [score["run"] for score in night["scores"]] == [run.id for run in runs[6:]]


def test_a_history_goes_on_over_nights_that_lack_facts_of_later_versions() -> None:
    new = {"params": "1", "scorer": "1", "judge_model": "the same", "judge_endpoint": "http://judge"}
    runs = many_nights([{"judge": "1"}] * 6 + [{"judge": "1", **new}] * 4)
    done = gate("--against", "history")
    assert done.returncode == 6
    assert f"since {runs[6].id}" in done.stderr
    assert "differs" not in gate("--against", runs[0].id).stderr
    assert "its history begins" not in done.stderr


@pytest.mark.parametrize("fact", ["model", *in_full("engine", "flags", "vllm")])
def test_a_history_goes_on_over_another_model(fact: str) -> None:
    runs = many_nights([{fact: "1"}] * 6 + [{fact: "2"}] * 4)
    done = gate("--against", "history")
    assert done.returncode == 6
    assert f"since {runs[6].id}" in done.stderr
    assert "its history begins" not in done.stderr


def failed_night(*, began_at: float) -> None:
    failed = nightly_files.kept(home(), RIGHT, began_at=began_at)
    error = SuiteRecord(name="sql", kind="sql", error="the engine died")
    keeping.write(home(), replace(failed, state=RunState.FAILED, suites=(error,)))


def test_a_decline_begins_with_its_night_though_one_before_failed() -> None:
    failed_night(began_at=1e9 - 1)
    runs = many_nights([{"model": "1"}] * 10)
    assert f"since {runs[6].id}" in gate("--against", "history").stderr


def test_a_night_that_failed_is_no_doubt_about_the_next_one() -> None:
    """Differences are told from the newest night with scores."""
    for night in range(9):
        nightly_files.kept(home(), RIGHT, began_at=1e9 + 86_400 * night, facts={"model": "1"})
    failed_night(began_at=2e9)
    nightly_files.kept(home(), RIGHT, began_at=2e9 + 86_400, facts={"model": "2"})
    done = gate("--against", "history")
    assert done.returncode == 0, done.stdout
    assert "the engine died" not in done.stderr
    assert "model differs (sql): 1 before, 2 now" in done.stderr
    assert gate("--against", "previous").returncode == 7


def test_questions_that_no_night_asked_cannot_be_judged() -> None:
    many_nights([{"data": "1"}] * 9 + [{"data": "2"}])
    done = gate("--against", "history")
    assert done.returncode == 7
    assert "sql asks or scores otherwise than every night before" in done.stderr


def test_against_its_history_an_equal_night_passes_and_a_worse_one_does_not() -> None:
    for night in range(9):
        nightly_files.kept(home(), RIGHT, began_at=1e9 + 86_400 * night)
    assert gate("--against", "history").returncode == 0
    nightly_files.kept(home(), WRONG, began_at=1e9 + 86_400 * 9)
    worse = gate("--against", "history")
    assert worse.returncode == 6
    assert "since" not in worse.stderr, "one night is no level"


def test_a_trial_with_a_limit_is_no_night_before() -> None:
    night = nightly_files.kept(home(), RIGHT, began_at=1e9)
    trial = nightly_files.kept(home(), RIGHT[:3], began_at=1e9 + 3600)
    keeping.write(home(), replace(trial, overrides={"limit": 3}))
    nightly_files.kept(home(), RIGHT, began_at=1e9 + 86_400)
    for against in ("previous", "history"):
        done = gate("--against", against)
        assert done.returncode == 0, done.stdout
    last = keeping.resolve(home(), "last")
    assert keeping.previous(home(), last) == night
    assert keeping.previous(home(), replace(last, overrides={"limit": 3})) == keeping.read(home(), trial.id)


def test_a_metric_of_which_less_is_better_is_worse_if_it_rises() -> None:
    plan = nightly_files.PLAN + "[suites.sql.metrics.score]\nlower_is_better = true\n"
    for night, scores in enumerate((WRONG, RIGHT)):
        nightly_files.kept(home(), scores, began_at=1e9 + night, plan=plan)
    found = json.loads(gate("--against", "previous", "--json").stdout)
    (suite,) = found["comparison"]["suites"]
    assert (suite["verdict"], suite["rose"], suite["fell"]) == ("worse", 20, 0)
    assert suite["after"] - suite["before"] == pytest.approx(suite["difference"]) == pytest.approx(1 / 3)
    assert suite["low"] <= suite["difference"] <= suite["high"]
    assert suite["sentence"].startswith(f"worse: +0.333 ({suite['low']:+.3g} to {suite['high']:+.3g})")
    assert suite["sentence"].endswith("0 items fell and 20 rose")


def test_a_sample_is_the_same_every_night_and_a_larger_one_contains_it() -> None:
    small, large = sample(1000, 30, 7), sample(1000, 40, 7)
    assert small is not None
    assert large is not None
    assert sample(1000, 30, 7) == small
    assert set(small) < set(large)
    assert small != sample(1000, 30, 8)
    assert sample(30, 30, 7) is None


def test_a_suite_that_fails_leaves_the_others_and_is_asked_no_more(tmp_path: Path, file: Path) -> None:
    file = nightly_files.written(tmp_path, suites=["sql", "python"], rows=6)
    (tmp_path / "scorers.py").write_text("def words(answer, row):\n    raise KeyError('no')\n")
    done = night(file)
    assert done.returncode == 1
    run = keeping.resolve(home(), "last")
    assert run.state is RunState.FAILED
    said = "suites.python.score: scorers.py line 2: KeyError: 'no'; a row has: question, answer, topic"
    assert {suite.name: suite.error for suite in run.suites} == {"sql": None, "python": said}


def test_rows_that_cannot_be_asked_score_nothing(tmp_path: Path, file: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text(questions.read_text().replace("question 1", "REJECT 1", 1))
    done = night(file, "--limit", "120")
    assert done.returncode == 5
    (suite,) = keeping.resolve(home(), "last").suites
    assert suite.failed == 1
    assert suite.scores[0].items == 120


def test_a_failed_row_that_a_mean_leaves_out_has_no_score(tmp_path: Path, file: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text(questions.read_text().replace("question 1", "REJECT 1", 1))
    file.write_text(file.read_text().replace("(job_id, row_index)", "(job_id, row_index) where i.topic > 0"))
    night(file)
    (suite,) = keeping.resolve(home(), "last").suites
    assert (suite.items, suite.failed) == (120, 1)
    assert suite.scores[0].items == 116


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ('data = "questions.jsonl"', 'data = "gone.jsonl"', "gone.jsonl"),
        ("{{ question }}", "{{ qestion }}", "qestion"),
        ('expected = "answer"', 'expected = "anser"', "'anser'"),
        ('expected = "answer"', 'expcted = "answer"', "did you mean expected?"),
        (
            "i.answer",
            "i.anser",
            "suites.sql.score: there is no column anser; correct it, and check with",
        ),
        (
            "select avg(",
            "select avg(sanity(1)) as sane, avg(",
            "there is no function sanity; correct it",
        ),
        ("select avg(", "select max(", "a score is either one of each row"),
        ('kind = "sql"', 'kind = "sqll"', "suites.sql: there is no kind 'sqll'"),
        ('prompt = "{{ question }}"', "", "asks nothing"),
    ],
)
def test_a_fault_of_a_suite_is_found_before_the_first_row(
    file: Path, before: str, after: str, fault: str
) -> None:
    file.write_text(file.read_text().replace(before, after))
    done = night(file)
    assert done.returncode == 2
    assert fault in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not keeping.runs(home())


def test_runs_have_names() -> None:
    first = nightly_files.kept(home(), RIGHT, began_at=1e9)
    with pytest.raises(UsageError, match="'' is no run"):
        keeping.resolve(home(), "")
    last = nightly_files.kept(home(), RIGHT, began_at=1e9 + 1)
    assert keeping.resolve(home(), "last~1") == first
    assert keeping.resolve(home(), first.id) == first
    commands.conserve("eval", "name", "last~1", "baseline")
    assert keeping.resolve(home(), "baseline") == first
    listed = json.loads(commands.conserve("eval", "list", "--json").stdout)
    assert [(run["id"], run["names"]) for run in listed] == [(last.id, []), (first.id, ["baseline"])]
    for wrong, said in (
        ("last~2", "has 2"),
        ("basline", "did you mean baseline"),
        ("lats", "mean last"),
        ("", "'' is no run|'' may be"),
    ):
        with pytest.raises(UsageError, match=said):
            keeping.resolve(home(), wrong)
    for wrong in ("last", "small:last~1", "history", first.id, " "):
        with pytest.raises(UsageError):
            keeping.name(home(), last, wrong)
    with pytest.raises(UsageError, match="has not ended"):
        keeping.name(home(), replace(last, state=RunState.GIVEN_UP), "other")
    trial = replace(last, overrides={"limit": 3})
    keeping.write(home(), trial)
    assert "a trial with 3 items" in commands.conserve("eval", "name", "last", "small").stderr


def test_a_run_in_a_backup_gets_no_name() -> None:
    run = nightly_files.kept(home(), RIGHT, began_at=1e9)
    (home() / "backup.json").write_text("{}")
    done = commands.conserve("eval", "name", run.id, "baseline")
    assert (done.returncode, "is a backup, which commands only read" in done.stderr) == (1, True)
    assert keeping.names_of(load().home, run) == []


def test_a_name_is_of_one_evaluation() -> None:
    """Two evaluations in one store: their files compare with a baseline each."""
    plan = f'against = "baseline"\n{nightly_files.PLAN}'
    ours, theirs = (
        [
            nightly_files.kept(home(), RIGHT, began_at=began_at + night, plan=plan, evaluation=evaluation)
            for night in range(2)
        ]
        for began_at, evaluation in ((1e9, "ours"), (1e9 + 86_400, "theirs"))
    )

    def against(*words: str) -> str:
        done = commands.conserve("eval", "report", ours[1].id, *words, "--json")
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["comparison"]["before"])

    commands.conserve("eval", "name", theirs[0].id, "baseline")
    assert against() == ours[0].id, "as previous: this evaluation has no baseline"
    named = commands.conserve("eval", "report", ours[1].id, "--against", "baseline")
    assert named.returncode == 2
    assert f"{theirs[0].id} is of 'theirs'" in named.stderr
    commands.conserve("eval", "name", ours[1].id, "baseline")
    assert against("--against", "baseline") == against() == ours[1].id
    assert against("--against", "last~1") == ours[0].id
    assert [keeping.names_of(home(), run) for run in (ours[1], theirs[0])] == [["baseline"]] * 2
    commands.conserve("eval", "name", ours[0].id, "baseline")
    assert [keeping.names_of(home(), run) for run in (*ours, theirs[0])] == [["baseline"], [], ["baseline"]]
    with pytest.raises(UsageError, match="may be"):
        keeping.resolve(home(), "baseline")
    found = commands.conserve("eval", "compare", theirs[0].id, ours[1].id)
    assert "compare runs of one evaluation" in found.stderr


def test_the_last_run_is_of_the_evaluation_that_is_named() -> None:
    """Two nights at once: the one that begins first ends last, and is worse."""
    for evaluation, scores, began_at in (
        ("long", RIGHT, 1e9),
        ("long", WRONG, 2e9),
        ("short", RIGHT, 1e9 + 60),
        ("short", RIGHT, 2e9 + 60),
    ):
        nightly_files.kept(home(), scores, began_at=began_at, evaluation=evaluation)
    newest = gate("--against", "last~1")
    assert newest.returncode == 0
    assert "last is a run of 'short'; " in newest.stderr
    assert "conserve eval report long:last" in newest.stderr

    def of_long(command: str, *words: str) -> Done:
        done = commands.conserve("eval", command, *words)
        assert "is a run of" not in done.stderr
        return done

    assert of_long("gate", "long:last", "--against", "long:last~1").returncode == 6
    assert "worse" in of_long("compare", "long:last~1", "long:last").stdout
    assert of_long("gate", "long:last", "--against", "short:last").returncode == 2
    long = keeping.resolve(home(), "long:last")
    assert keeping.resolve(home(), f"long:{long.id}") == long
    assert of_long("name", "long:last", "baseline").returncode == 0
    commands.conserve("eval", "name", "last", "baseline")
    assert keeping.resolve(home(), "long:baseline") == long
    for wrong in ("lon:last", "long:short", "long:", f"short:{long.id}"):
        with pytest.raises(UsageError, match=r"is no run|may be"):
            keeping.resolve(home(), wrong)
    keeping.name(home(), long, "short:final")
    assert keeping.resolve(home(), "short:final") == long, "a name may have a colon"


def test_a_night_of_an_evaluation_that_has_not_ended_is_not_judged_by_another(file: Path) -> None:
    nightly_files.kept(home(), RIGHT, began_at=1e9, evaluation="other")
    assert night(file, endpoint="http://127.0.0.1:9").returncode == 1
    assert "last is a run of 'other'; " in gate().stderr
    for last in ("small:last", "small:last~0"):
        first = commands.conserve("eval", "gate", last)
        assert first.returncode == 7
        assert "it has not ended; go on with it" in first.stdout
    nightly_files.kept(home(), RIGHT, began_at=1e9)
    for last in ("small:last", "small:last~0"):
        assert "it has not ended" in commands.conserve("eval", "gate", last).stdout


def test_the_first_name_is_told_how_to_give() -> None:
    nightly_files.kept(home(), RIGHT, began_at=1e9)
    with pytest.raises(UsageError, match="conserve eval name last baseline"):
        keeping.resolve(home(), "baseline")


@pytest.mark.parametrize(
    ("refused", "said"), [("question 1", "31 without an answer ("), ("question", "got one (")]
)
def test_items_without_an_answer_are_told_with_the_reason(file: Path, refused: str, said: str) -> None:
    done = night(file, endpoint=f"fake:?reject={refused}".replace(" ", "%20"))
    assert said in done.stderr, done.stderr
    (error,) = {row[0] for row in conserve.open().sql("select distinct error from results").fetchall()} - {
        None
    }
    assert f"({error})" in done.stderr


def test_retention_spares_runs_with_a_name() -> None:
    first, second, third = (
        nightly_files.kept(home(), RIGHT, began_at=1e9 + 86_400 * day) for day in range(3)
    )
    keeping.name(home(), first, "baseline")
    plan = plan_of(f'keep = "36h"\n{nightly_files.PLAN}')
    fourth = nightly_files.kept(home(), RIGHT, began_at=1e9 + 86_400 * 2.5)
    remove_outdated(conserve.open()._settings, plan, fourth, now=1e9 + 3 * 86_400, say=print)
    assert [run.id for run in keeping.runs(home())] == [first.id, third.id, fourth.id]
    assert not (home() / "evals" / "runs" / second.id).exists()


def test_retention_spares_the_run_and_what_it_is_compared_with(file: Path) -> None:
    file.write_text(f'keep = "1s"\n{file.read_text()}')
    nights = [nightly_files.kept(home(), RIGHT, began_at=1e9 + night) for night in range(2)]
    done = night(file)
    assert f"{nights[0].id} is removed" in done.stderr
    assert f"than {nights[1].id}" in done.stdout
    assert next(run.id for run in keeping.runs(home())) == nights[1].id


def test_where_the_named_run_is_gone_the_night_is_compared_with_the_one_before_and_says_so(
    file: Path,
) -> None:
    file.write_text(f'against = "baseline"\n{file.read_text()}')
    first, second = (nightly_files.kept(home(), RIGHT, began_at=1e9 + night) for night in range(2))
    keeping.name(home(), first, "baseline")
    keeping.remove(home(), first)
    done = night(file)
    assert (
        f"the run {first.id}, called baseline, is gone; run: conserve eval name last baseline" in done.stderr
    )
    assert f"than {second.id}" in done.stdout
    report = commands.conserve("eval", "report", "last")
    assert (report.returncode, f"the run {first.id}, called baseline, is gone" in report.stderr) == (2, True)


@pytest.mark.parametrize("against", ["last~2", None, "history"])
def test_retention_spares_the_run_that_the_file_compares_with(against: str | None) -> None:
    """A run that an id stands for, as a file may name its baseline."""
    nights = [nightly_files.kept(home(), RIGHT, began_at=1e9 + 86_400 * day) for day in range(3)]
    plan = plan_of(f'keep = "1s"\nagainst = "{against or nights[0].id}"\n{nightly_files.PLAN}')
    remove_outdated(conserve.open()._settings, plan, nights[2], now=2e9, say=print)
    left = nights[1:] if against == "history" else nights
    assert [run.id for run in keeping.runs(home())] == [run.id for run in left]


def test_where_the_run_of_an_id_is_gone_the_night_is_compared_with_the_one_before_and_says_so(
    file: Path,
) -> None:
    first, second = (nightly_files.kept(home(), RIGHT, began_at=1e9 + 86_400 * day) for day in range(2))
    file.write_text(f'against = "{first.id}"\n{file.read_text()}')
    keeping.remove(home(), first)
    done = night(file)
    said = f"the file compares with another run: '{first.id}' is no run"
    assert f"{said}; run: conserve eval list" in done.stderr
    assert f"than {second.id}" in done.stdout
    report = commands.conserve("eval", "report", "last")
    assert (report.returncode, said in report.stderr) == (2, True)


def test_a_file_may_compare_with_a_run_by_its_id() -> None:
    first = nightly_files.kept(home(), RIGHT, began_at=1e9)
    plan = f'against = "{first.id}"\n{nightly_files.PLAN}'
    runs = [nightly_files.kept(home(), RIGHT, began_at=1e9 + 60 * night, plan=plan) for night in (1, 2)]
    assert against_of(home(), runs[1], None, first.id) == first.id
    assert against_of(home(), runs[1], None, "baseline") == "previous", "until a run has that name"


def test_an_id_of_a_file_that_says_too_little_is_told_as_such() -> None:
    first, second, last = (nightly_files.kept(home(), RIGHT, began_at=1e9 + 60 * night) for night in range(3))
    day = last.id.rpartition("-")[0]
    said = f"^the file compares with another run: '{day}' may be {first.id} or {second.id}; run: conserve eval list"
    with pytest.raises(UsageError, match=said):
        against_of(home(), last, None, day)
    keeping.write(home(), replace(first, state=RunState.GIVEN_UP))
    with pytest.raises(UsageError, match=f"^the file compares with another run: {first.id} has not ended"):
        against_of(home(), last, None, first.id)


def test_a_run_that_has_not_ended_is_no_baseline() -> None:
    first, second = (nightly_files.kept(home(), RIGHT, began_at=1e9 + night) for night in range(2))
    for state in (RunState.GIVEN_UP, RunState.RUNNING):
        keeping.write(home(), replace(first, state=state))
        done = commands.conserve("eval", "gate", second.id, "--against", first.id)
        assert done.returncode == 2
        assert f"{first.id} has not ended; compare with a run that has" in done.stderr


@pytest.mark.parametrize(("word", "meant"), [("histroy", "history"), ("previus", "previous")])
def test_a_mistyped_word_is_no_name_of_a_run(word: str, meant: str) -> None:
    with pytest.raises(SettingsError, match=f"against is '{word}'; did you mean {meant}"):
        plan_of(f'against = "{word}"\n{nightly_files.PLAN}')
    assert plan_of(f'against = "{meant}"\n{nightly_files.PLAN}').against == meant


def test_a_metric_that_is_gone_is_a_case_that_was_skipped() -> None:
    before = nightly_files.kept(home(), RIGHT, began_at=1e9)
    after = nightly_files.kept(home(), RIGHT, began_at=1e9 + 60)
    items = [Item(id="1", prompt="", answer="a", scores={"other": 1.0})]
    keeping.write_items(home(), after.id, "items-sql.parquet", "sql", items)
    report = text_in_form(document(home(), after, before.id), "junit")
    assert 'skipped="2"' in report, "and the new one has nothing to compare with"
    assert '<testcase classname="sql" name="comparison">' in report
    assert "has no score, which" in report


def test_a_run_that_meets_another_is_skipped_if_the_file_says_so(file: Path) -> None:
    file.write_text(f'overlap = "skip"\n{file.read_text()}')
    with held(home(), "small", "queue", print) as hold:
        assert hold == "ours"
        done = night(file)
        found = json.loads(night(file, "--json").stdout)
    assert (done.returncode, done.stdout) == (0, "")
    assert "this one is skipped" in done.stderr
    assert not keeping.runs(home())
    assert (found["run"], found["comparison"]) == (None, None)
    assert found["headline"] == "Skipped: an earlier run is still going."
    assert night(file).returncode == 0
    assert json.loads(commands.conserve("eval", "report", "--json").stdout).keys() == found.keys()


def test_a_check_without_a_fault_is_a_document_too(file: Path) -> None:
    done = night(file, "--check", "--json")
    assert json.loads(done.stdout) == {"evaluation": "small", "suites": ["sql"]}
    assert night(file, "--check").stdout == ""


def damaged(run: RunRecord) -> Path:
    """Folder of a run whose items cannot be read from now on."""
    folder = home() / "evals" / "runs" / run.id
    (folder / "items-sql.parquet").write_bytes(b"PAR1 no")
    return folder


def test_a_damaged_record_or_file_hides_no_other() -> None:
    first, second, last = (nightly_files.kept(home(), RIGHT, began_at=1e9 + day) for day in range(3))
    folder = damaged(first)
    (folder.with_name(last.id) / "run.json").write_text("{")
    assert [run.id for run in keeping.runs(home())] == [first.id, second.id]
    seen = conserve.open().sql("select run_id, count(*) from eval_items group by 1").fetchall()
    assert seen == [(second.id, len(RIGHT))]
    with pytest.raises(StoreDamaged):
        list(rows_of(folder / "items-sql.parquet", ("item",)))


def test_a_damaged_night_is_left_out_of_the_level_and_its_flips_of_the_report(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs = [nightly_files.kept(home(), RIGHT, began_at=1e9 + 86_400 * day) for day in range(4)]
    damaged(runs[2])
    done = gate("--against", "history")
    assert (done.returncode, "No worse than its history" in done.stdout) == (0, True), done.stderr
    for said in ("the night is left out of the level: ", "flips of sql are left out: "):
        assert f"{said}the items {home() / 'evals' / 'runs' / runs[2].id}" in caplog.text
    for run in runs[:2]:
        damaged(run)
    done = gate("--against", "history")
    assert done.returncode == 7
    assert "sql has no night before whose items can be read" in done.stderr


def test_a_damaged_baseline_is_named_with_the_commands_that_help() -> None:
    runs = [nightly_files.kept(home(), RIGHT, began_at=1e9 + 86_400 * day) for day in range(3)]
    keeping.name(home(), runs[1], "baseline")
    folder = damaged(runs[1])
    done = gate("--against", "baseline")
    assert done.returncode == 1
    assert f"of the run {runs[1].id} cannot be read" in done.stderr
    assert (
        f"or remove the run: rm -r {folder}; then name another: conserve eval name last baseline"
        in done.stderr
    )
    shutil.rmtree(folder)
    assert gate("--against", "previous").returncode == 0


def test_text_of_answers_is_no_markup() -> None:
    made = {
        "run": {
            "id": "x", "evaluation": "<script>", "names": [], "began_at": "2026-11-23", "state": "finished",
            "work_s": 1.0, "prompt_tokens": 1, "answer_tokens": 1, "harm": None, "suites": [],
        },
        "comparison": None, "headline": "<b>", "flips": [], "flips_against": None, "nights": [],
    }  # fmt: skip
    page = render(made, "page.html")
    assert "<script>" not in page
    assert "&lt;b&gt;" in page


def test_a_run_that_replaces_another_ends_it_and_begins_anew(
    file: Path, tmp_path: Path, forked: StartForked
) -> None:
    file.write_text(f'overlap = "replace"\n{file.read_text()}')
    slow = {"CONSERVE_ENDPOINT": "fake:?tokens=8&token_ms=200&capacity=1"}
    first = forked("eval", "run", str(file), "--limit", "100", **slow)
    begun = lambda: bool(keeping.runs(load().home)) and any(job.running for job in readings())  # noqa: E731
    commands.until(begun, first, every_s=0.05)
    second = night(file, "--limit", "3")
    assert second.returncode == 0, second.stderr
    assert commands.ended(first).returncode == 130
    old, new = keeping.runs(home())
    assert (old.state, new.state) == (RunState.GIVEN_UP, RunState.FINISHED)
    assert new.overrides == {"limit": 3}


def readings() -> list[JobReading]:
    return read_jobs(load(), now=time.time())


@pytest.mark.filterwarnings("ignore::conserve.errors.RowsUnanswerable")
def test_rows_that_are_picked_or_judged_have_the_values_of_their_file(tmp_path: Path, file: Path) -> None:
    """Lists stay lists, and half of a surrogate pair fails its row alone, as where all rows are asked."""
    rows = [
        '{"question": "first", "choices": ["red", "blue"], "text": "one"}',
        '{"question": "\\ud83d", "choices": ["red", "blue"], "text": "two"}',
        '{"question": "third", "choices": ["green"], "text": "three"}',
    ]
    (tmp_path / "odd.jsonl").write_text("".join(f"{row}\n" for row in rows * 2))
    words = ", ".join(f"{word} = 1" for word in nightly_files.WORDS)
    asks = "{{ question }} {{ choices[0] }} {{ text }}"
    common = f'data = "odd.jsonl"\nprompt = "{asks}"\nlimit = 5\n'
    file.write_text(
        'name = "odd"\nseed = 1\n'
        f'[suites.judged]\nkind = "judge"\n{common}'
        f'[suites.judged.judge]\nprompt = "{asks} {{{{ answer_of_model }}}}"\ngrades = {{ {words} }}\n'
        f'[suites.picked]\nkind = "python"\n{common}score = "scorers:words"\n'
        "[suites.picked.metrics.lenght]\nlower_is_better = true\n"
    )
    (tmp_path / "scorers.py").write_text(
        'def words(answer, row):\n    return {"length": len(answer.split())}\n'
    )
    done = night(file)
    assert "suites.picked.metrics.lenght: no item has such a score; there are: length" in done.stderr
    (run,) = keeping.runs(home())
    for suite in run.suites:
        assert suite.items == 5
        assert suite.failed in (1, 2)
        assert "half of a surrogate pair" in str(suite.first_error)
    prompts = conserve.open().sql("select distinct prompt from requests").fetchall()
    asked = {prompt for (prompt,) in prompts if prompt is not None}
    assert {one for one in asked if one.startswith(("first red one", "third green three"))} == asked
    assert {"first red one", "third green three"} < asked, "the judge's have an answer behind them"


def test_a_row_without_an_id_is_no_row_with_one(tmp_path: Path, file: Path) -> None:
    ids = [1, None, 0]
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps({"id": one, "q": "why"}) + "\n" for one in ids))
    (tmp_path / "scorers.py").write_text("def by_id(answer, row):\n    return (row['id'] or 0) / 2\n")
    file.write_text(
        'name = "odd"\n[suites.ids]\nkind = "python"\ndata = "odd.jsonl"\nid = "id"\nprompt = "{{ q }}"\n'
        'score = "scorers:by_id"\n'
    )
    assert night(file).returncode == 0
    items = conserve.open().sql("select item, score from eval_items order by item").fetchall()
    assert items == [("0", 0.0), ("1", 0.5), ("row 1", 0.0)]


def test_where_no_question_has_an_answer_there_is_nothing_to_judge(tmp_path: Path, file: Path) -> None:
    (tmp_path / "odd.jsonl").write_text('{"q": "REJECT"}\n')
    file.write_text(
        'name = "odd"\n[suites.judged]\nkind = "judge"\ndata = "odd.jsonl"\nprompt = "{{ q }}"\n'
        "[suites.judged.judge]\nprompt = 'Right? {{ answer_of_model }}'\n"
    )
    done = night(file)
    assert "judged: score 0 (0 to 0.793), 1 items, 1 without an answer (scripted rejection)" in done.stderr
    (suite,) = keeping.resolve(home(), "last").suites
    assert {"judge", "judge_model", "judge_endpoint", "scorer"} <= suite.facts.keys(), "as of any night"
