"""`conserve eval` where a part of the night goes wrong: no verdict rests on what is missing."""

import math
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import duckdb
import numpy as np
import pytest

import conserve
from conserve.config import load
from conserve.errors import JobRefused, RowsFailed, UsageError
from conserve.evals.bootstrap import source_numbers
from conserve.evals.comparison import SuiteMetric, SuiteScores, judge_together, unpaired_suites
from conserve.evals.outcome import Item
from conserve.evals.plan import ModelTarget
from conserve.evals.plan_file import plan_of
from conserve.evals.records import RunRecord
from conserve.evals.verdict import SuiteVerdict, Verdict
from conserve.nightly import keeping, served_jobs
from conserve.nightly.harness import lm_eval_suite
from conserve.nightly.harness.inspect_suite import with_failed
from conserve.nightly.init_file import NightlyWishes, text_of
from conserve.nightly.items import ItemKey, Scored
from conserve.nightly.kinds import waves
from conserve.nightly.questions import Answer, whole_results
from conserve.nightly.run_comparisons import mean
from conserve.nightly.run_jobs import Answering, AskedJob, SuiteNight
from conserve.nightly.running import means
from conserve.nightly.samples import own_names
from conserve.nightly.scored import check_names, metric_of
from conserve.store.books.states import JobState
from conserve.store.sql.bind_mistakes import check_names as check_score_names
from conserve.store.sql.per_row import by_row
from tests import commands, nightly_files
from tests.commands import Done
from tests.tiers import in_full


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONSERVE_FAKE", "1")
    monkeypatch.setenv("CONSERVE_ENDPOINT", "fake:?tokens=8")
    return nightly_files.written(tmp_path, suites=["python"], rows=6, top="worse.effect = 0.1")


def night(file: Path, *more: str) -> Done:
    return commands.conserve("eval", "run", str(file), *more)


def home() -> Path:
    return conserve.open().path


def last() -> RunRecord:
    return keeping.resolve(home(), "last")


def scorer(file: Path, body: str) -> None:
    (file.parent / "scorers.py").write_text(f"def words(answer, row):\n    {body}\n")


def error_of(run: RunRecord) -> str:
    (suite,) = run.suites
    assert suite.error is not None
    return suite.error


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        ("nan", "no finite number"),
        ("1e200", "beyond 1e+100"),
        *in_full(("inf", "no finite number"), ("-inf", "no finite number"), ("-1e101", "beyond 1e+100")),
    ],
)
def test_a_score_that_no_mean_can_hold_is_an_error_of_the_suite(file: Path, bad: str, fault: str) -> None:
    scorer(file, f"return float('{bad}') if row['topic'] else 1.0")
    assert night(file).returncode == 1
    assert f"is {fault}; return null instead" in error_of(last())


def test_a_name_that_no_run_has_comes_with_the_command_that_gives_it() -> None:
    run = nightly_files.kept(home(), [1.0], began_at=1e9)
    gate = commands.conserve("eval", "gate", "last", "--against", "baseline")
    assert gate.returncode == 2
    assert gate.stderr.rstrip().endswith("or name the last run: conserve eval name last baseline")
    assert commands.conserve("eval", "name", "last", "baseline").returncode == 0
    assert keeping.resolve(home(), "baseline").id == run.id


@pytest.mark.parametrize(
    "fits", ["i.answer.part = 1", "list_contains(i.answer, r.text)", "i.input_text = r.text"]
)
def test_a_score_whose_types_only_the_rows_tell_is_no_fault(fits: str) -> None:
    joined = "results r join inputs i using (job_id, row_index)"
    check_score_names(by_row(f"select avg({fits}) from {joined}").select, ["question", "answer", "text"])


def test_a_record_that_cannot_be_read_is_named_in_the_list() -> None:
    run = nightly_files.kept(home(), [1.0], began_at=1e9)
    record = home() / "evals" / "runs" / run.id / "run.json"
    record.write_text(record.read_text().replace('"mean":1.0', '"mean":null'))
    done = commands.conserve("eval", "list")
    assert done.returncode == 0
    assert f"the run {run.id} is left out" in done.stderr


@pytest.mark.parametrize(
    ("verb", "says"), [("pause", "conserve resume"), ("cancel", "run the evaluation again")]
)
def test_a_job_that_is_stopped_in_the_night_has_no_scores(verb: str, says: str, tmp_path: Path) -> None:
    job = conserve.open().submit([{"text": "a"}, {"text": "b"}], prompt="{{ text }}")
    stop = Mock(wait=lambda *wanted: getattr(job, verb)())
    plan = plan_of(nightly_files.PLAN)
    (suite,), (target,) = plan.suites, plan.targets
    night = SuiteNight(
        load(),
        stop,
        run_id="r",
        label="sql",
        suite=suite,
        target=target,
        folder=tmp_path,
        model_asked=lambda target: None,
    )
    with pytest.raises(JobRefused, match=says):
        night.await_answers(job)


def test_a_job_that_a_server_does_not_answer_ends_its_suite_alone() -> None:
    """The wait for it ends without an error; `SuiteNight.await_answers` names the command that goes on with it."""
    job = conserve.open().submit([{"text": "a"}], prompt="{{ text }}")
    job.cancel()
    answering = Answering(load(), progress=False, say=print)
    answering.answer([AskedJob(job.id, ModelTarget(answered_by="serve"))])
    assert answering.live_latencies is None


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.EXPIRED])
def test_a_paused_job_that_a_server_would_answer_is_told_once(
    state: JobState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_jobs, "answers", lambda settings: [])
    said: list[str] = []
    job = Mock(id="j", status=JobState.PAUSED, wait=Mock(side_effect=[TimeoutError, TimeoutError, state]))
    assert served_jobs.await_served(job, load(), None, said.append) is None
    (once,) = said
    assert once.endswith("conserve resume j")


def test_a_missing_row_gives_its_place_to_no_other() -> None:
    job = Mock(id="j", status="completed", progress=lambda: Mock(rows=3))
    rows = [{"row_index": index} for index in range(3)]
    assert list(whole_results(job, rows)) == rows
    for lacking in (rows[:2], rows[1:], [rows[0], rows[2]]):
        with pytest.raises(RowsFailed, match="has no result"):
            list(whole_results(job, lacking))


LESS = "[suites.sql.metrics.score]\nlower_is_better = true\n"


@pytest.mark.parametrize(("plan", "best"), [(nightly_files.PLAN, 1.0), (nightly_files.PLAN + LESS, 0.0)])
def test_items_that_have_lost_their_score_leave_a_doubt(plan: str, best: float) -> None:
    for day, unanswered in enumerate((0, 20)):
        nightly_files.kept(home(), [best] * 60, began_at=1e9 + day, plan=plan, unanswered=unanswered)
    for against in ("previous", "history"):
        done = commands.conserve("eval", "gate", "last", "--against", against)
        assert done.returncode == 7
        said, _, command = done.stdout.partition("; look with: conserve sql ")
        assert said.endswith("cannot tell: 20 items without the score of before")
    seen = commands.conserve("sql", command.splitlines()[0].strip('" '))
    assert seen.stdout.count("none") == 20


def with_lost(before: Sequence[float], lost: int, plan: str = "") -> SuiteVerdict:
    """Verdict on equal scores, of which the first ones are lost."""
    then = dict(enumerate(before))
    now = {item: score for item, score in then.items() if item >= lost}
    sources = {item: f"item {item}" for item in then}
    plans = {"sql": plan_of(nightly_files.PLAN + plan).suites[0]}
    scores = ({"sql": SuiteScores({"score": one}, sources)} for one in (then, now))
    return judge_together(*scores, plans)[0][SuiteMetric("sql", "score")]


def test_lost_scores_that_could_change_nothing_leave_no_doubt() -> None:
    assert with_lost([1.0] * 200, 2).verdict is Verdict.NO_WORSE
    assert with_lost([0.0] * 150 + [1.0] * 50, 150).verdict is Verdict.NO_WORSE
    assert with_lost([1.0] * 200, 2, LESS).verdict is Verdict.NO_WORSE
    assert with_lost([0.0] * 150 + [30.0] * 50, 40, LESS).verdict is Verdict.CANNOT_TELL


def test_an_item_without_an_answer_scores_nothing_where_less_is_better() -> None:
    plan = nightly_files.PLAN + LESS
    assert plan_of(plan).suites[0].unanswered(["score", "other"]) == {"other": 0.0}


def test_failed_samples_of_inspect_score_nothing() -> None:
    (suite,) = plan_of(nightly_files.PLAN + LESS).suites
    good = Item(id="1", prompt="", answer="a", scores={"score": 0.5, "exact": 1.0})
    failed = Item(id="2", prompt="", answer=None, scores={}, error="no")
    assert with_failed(suite, [good, failed])[1].scores == {"exact": 0.0}


def test_a_long_text_as_the_source_of_items_is_held_once() -> None:
    """Texts in an array are all as long as the longest: a gigabyte of 2,500 items with a page each."""
    keys = [ItemKey(str(n), 1) for n in range(100)]
    text, scores = "x" * 100_000, {key: float(n % 2) for n, key in enumerate(keys)}
    scored = Scored(by_metric={"score": scores}, sources=dict.fromkeys(keys, text) | {keys[0]: "other"})
    tracemalloc.start()
    try:
        (found,) = means(plan_of(nightly_files.PLAN).suites[0], scored)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.mean == 0.5
    assert most < 100 * len(text)


def test_sources_are_numbered_in_their_order() -> None:
    assert source_numbers(["b", "a", "b", 1]).tolist() == [0, 1, 0, 2]


def test_a_scorer_that_exits_ends_its_suite_and_not_the_night(file: Path) -> None:
    scorer(file, "raise SystemExit(3)")
    assert night(file).returncode == 1
    assert "it ended by SystemExit: 3" in error_of(last())
    (file.parent / "scorers.py").write_text("raise SystemExit(3)\n")
    done = night(file)
    assert done.returncode == 2
    assert "cannot be imported" in done.stderr


def test_suites_of_inspect_are_waves_of_their_own() -> None:
    kinds = {"a": "inspect", "b": "sql", "c": "inspect", "d": "lm-eval", "e": "inspect"}
    assert waves(kinds) == [["a", "b", "d"], ["c"], ["e"]]
    assert waves({}) == []


@pytest.mark.parametrize(
    ("metric", "value", "score"),
    [
        ("acc", True, 1.0),
        ("word_perplexity", (-32.0, 10), math.exp(3.2)),
        ("byte_perplexity", [-8, 4], math.exp(2)),
        ("bits_per_byte", (-8 * math.log(2), 4), 2.0),
        ("word_perplexity", (-8.0, 0), None),
        ("word_perplexity", (-1e6, 1), None),
        ("word_perplexity", (-231.0, 1), None),
        ("acc", np.bool_(True), 1.0),
        ("acc", np.int64(1), 1.0),
        ("acc", np.float32(0.5), 0.5),
        ("f1", (1, 0), None),
        ("mcc", (1, 1), None),
        ("perplexity", -8.5, None),
        ("bleu", ("a", "b"), None),
    ],
)
def test_scores_of_lm_eval_are_those_of_single_items(metric: str, value: object, score: float | None) -> None:
    found = lm_eval_suite.number(value, metric)
    assert found is None if score is None else found == pytest.approx(score)


def test_metrics_of_lm_eval_without_scores_of_items_are_named() -> None:
    samples = [{"metrics": ["acc", "f1"], "acc": acc, "f1": (1, 0)} for acc in (None, 1.0)]
    assert lm_eval_suite.unscored_metrics({"samples": {"task": samples}}) == ["f1"]


def test_of_a_perplexity_less_is_better_unless_the_file_says_otherwise() -> None:
    def lower(metric: str, table: str = "", kind: str = "lm-eval") -> bool:
        (suite,) = plan_of(f'[suites.x]\nkind = "{kind}"\ntasks = ["a"]\n{table}').suites
        return suite.metric(metric).lower_is_better

    assert lower("word_perplexity")
    assert lower("bits_per_byte,none")
    assert lower("bits_per_byte", "[suites.x.metrics.bits_per_byte]\neffect = 0.1")
    assert not lower("bits_per_byte", "[suites.x.metrics.bits_per_byte]\nlower_is_better = false")
    assert not lower("acc")
    assert not lower("bits_per_byte", kind="sql")


HIT = {"score": 1.0}
BOTH = {"score": 1.0, "other": 0.5}


def against(
    before: dict[str, float], after: dict[str, float], plan: str = ""
) -> tuple[dict[str, str], dict[SuiteMetric, SuiteVerdict]]:
    """Suites that cannot be judged, and verdicts, on sixty items with the same scores."""
    plans = {"sql": plan_of(nightly_files.PLAN + plan).suites[0]}
    then, now = (
        {"sql": SuiteScores({m: dict.fromkeys(range(60), s) for m, s in each.items()}, {})}
        for each in (before, after)
    )
    judged, _ = judge_together(then, now, plans)
    return unpaired_suites(then, now, plans, judged, "monday"), judged


def test_a_metric_that_only_the_earlier_night_has_leaves_a_doubt() -> None:
    missing, judged = against(BOTH, HIT)
    assert missing["sql"].startswith("has no other, which monday has")
    assert judged[SuiteMetric("sql", "score")].verdict is Verdict.NO_WORSE
    assert against(HIT, BOTH)[0] == {}
    assert against(BOTH, HIT, "[suites.sql.metrics.other]\njudged = false\n")[0] == {}


def test_a_suite_that_is_only_reported_is_not_missing() -> None:
    assert against(HIT, HIT, "[suites.sql.metrics.score]\njudged = false\n") == ({}, {})


@pytest.mark.parametrize("score", [0.1, 0.3, 0.7, 1 / 3])
def test_the_level_of_equal_nights_is_their_very_score(score: float) -> None:
    assert all(mean([score] * nights) == score for nights in range(1, 15))


def test_the_first_score_finds_the_answer_behind_a_solution(tmp_path: Path) -> None:
    wishes = NightlyWishes(name="x", data="q.jsonl", prompt="{{ q }}", expected="answer")
    select = by_row(plan_of(text_of(wishes, wishes.expected)).suites[0].options["score"]).select
    duck = duckdb.connect()
    duck.execute(
        "create table results as from (values (1, 0, 'So it is FIVE.'), (1, 1, '7')) t(job_id, row_index, text)"
    )
    duck.execute(
        "create table inputs as from (values (1, 0, '2+3\n#### five'), (1, 1, '5')) t(job_id, row_index, answer)"
    )
    assert sorted(duck.execute(select).fetchall()) == [(0, 1.0), (1, 0.0)]


def test_a_suite_that_can_find_no_decline_says_so(file: Path) -> None:
    scorer(file, "return 0.0")
    done = night(file)
    assert done.returncode == 0
    assert "every item scores 0 by score: this suite can find no decline" in done.stderr


def test_two_nights_that_score_nothing_get_no_all_clear(tmp_path: Path) -> None:
    doubt = "every item scores 0 by score: this suite can find no decline"
    nightly_files.kept(home(), [0.0] * 60, began_at=1e9)
    nightly_files.kept(home(), [0.0] * 60, began_at=1e9 + 86_400)
    for against in ("previous", "history", "last"):
        gate = commands.conserve("eval", "gate", "last", "--against", against)
        assert gate.returncode == 7
        assert doubt in gate.stdout
        assert "Cannot tell whether it is worse" in gate.stdout
    assert doubt in commands.conserve("eval", "compare").stdout
    forms = {form: tmp_path / form for form in ("html", "markdown", "junit")}
    flags = [word for form, path in forms.items() for word in (f"--{form}", str(path))]
    assert commands.conserve("eval", "report", *flags).returncode == 0
    assert all(doubt in path.read_text() for path in forms.values())


def test_a_night_that_scores_where_the_other_did_not_is_judged() -> None:
    name, nothing = SuiteMetric("sql", "score"), {"score": 0.0}
    assert against(nothing, HIT)[1][name].verdict is Verdict.NO_WORSE
    assert against(HIT, nothing)[1][name].verdict is Verdict.WORSE
    less = "[suites.sql.metrics.score]\nlower_is_better = true\n"
    assert against(nothing, nothing, less)[1][name].verdict is Verdict.NO_WORSE


def test_scores_without_a_name_are_one_at_most() -> None:
    named = (
        "exact",
        "my-score",
        "pass@1 (strict)",
        "avg(a)",
        "(a = b)",
        "CASE  WHEN (a) THEN (1) ELSE 0 END",
    )
    assert [metric_of(name) for name in named] == [*named[:3], *["score"] * 3]
    check_names("x", ("exact", "my-score", "avg(a)"))
    with pytest.raises(UsageError, match="name each"):
        check_names("x", ("avg(a)", "(a = b)"))


@pytest.mark.parametrize(
    "names", [("text", "x"), ("input_text", "x"), ("Text", "input_text"), ("id", "prompt")]
)
def test_columns_have_the_names_of_the_data_set(names: Sequence[str], file: Path) -> None:
    job = conserve.open().submit([dict.fromkeys(names, "a")], prompt="{{ " + names[0] + " }}")
    job.run(progress=False)
    (row,) = job.results(with_inputs=True, with_prompts=True)
    assert Answer(row, 0, Mock(names=own_names(names)), Mock()).columns == dict.fromkeys(names, "a")
