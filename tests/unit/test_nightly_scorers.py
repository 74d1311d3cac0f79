"""Mistakes in scorers: those that `--check` finds, those that it lets pass, and sentences of the night."""

import datetime
import importlib
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import conserve
from conserve.errors import SettingsError, UsageError
from conserve.evals.plan import ModelTarget
from conserve.evals.plan_file import plan_of
from conserve.nightly import keeping, trials
from conserve.nightly.harness.options import typed_options
from conserve.nightly.judged import Judge
from conserve.nightly.options import Options
from conserve.nightly.running import check
from conserve.nightly.scored import module_of
from tests import commands
from tests.tiers import in_full

JOINED = "from results r join inputs i using (job_id, row_index)"
AGAIN = "check with: conserve eval run FILE --check"
ROWS = [
    {"qid": f"q{n}", "question": f"question {n}", "answer": "amber", "n": n, "share": 0.5, "tags": ["a"]}
    for n in range(8)
]


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])  # the folder of a scorer is added to it
    monkeypatch.setenv("CONSERVE_FAKE", "1")
    monkeypatch.setenv("CONSERVE_ENDPOINT", "fake:?tokens=8")
    lines(tmp_path, ROWS)


def lines(folder: Path, rows: list[dict[str, object]]) -> None:
    (folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(folder: Path) -> None:
    """Write a Parquet file with types that lines of JSON lack."""
    columns = {
        "question": pa.array(["a", "b"]),
        "text": pa.array(["c", "d"]),
        "day": pa.array([datetime.date(2020, 1, 1)] * 2),
        "tags": pa.array([["a"], ["b"]]),
        "parts": pa.array([{"x": 1}, {"x": 2}]),
    }
    pq.write_table(pa.table(columns), folder / "q.parquet")


def suite(kind: str, score: str, *, data: str = "q.jsonl", more: str = "") -> str:
    return (
        f'[suites.q]\nkind = "{kind}"\ndata = "{data}"\nprompt = "{{{{ question }}}}"\n'
        f"score = {json.dumps(score)}\n{more}\n"
    )


def checked(folder: Path, text: str) -> None:
    check(plan_of(text), folder)


def judge_of(folder: Path, entry: str) -> Judge:
    """Judge that is shown the answer, with one more entry."""
    entries = f"prompt = '{{{{ answer_of_model }}}}'\n{entry}\n"
    (plan,) = plan_of(f'[suites.q]\nkind = "judge"\n[suites.q.judge]\n{entries}').suites
    return Judge(Options(plan, folder, own=("judge",)))


def checked_select(folder: Path, score: str, *, data: str = "q.jsonl", more: str = "") -> None:
    checked(folder, suite("sql", f"select avg({score}) {JOINED}", data=data, more=more))


def checked_function(folder: Path, *body: str) -> None:
    function(folder, *body)
    checked(folder, suite("python", "myscore:score"))


def function(folder: Path, *body: str) -> None:
    (folder / "myscore.py").write_text(
        "import json, re\ndef score(answer, row):\n" + "".join(f"    {line}\n" for line in body)
    )


def error_of_night(folder: Path, text: str) -> str:
    """Error of the suite after a night that had no other fault; the command shows it, and no traceback."""
    (folder / "nightly.toml").write_text(text)
    done = commands.conserve("eval", "run", str(folder / "nightly.toml"))
    assert done.returncode == 1, done.stderr
    (record,) = keeping.resolve(conserve.open().path, "last").suites
    assert record.error is not None
    assert record.error in done.stderr
    assert "Traceback" not in done.stderr
    return record.error


@pytest.mark.parametrize(
    ("score", "says"),
    [
        (
            "2*contains(r.text, i.answer)",
            "types '*(INTEGER_LITERAL, BOOLEAN)'. You might need to add explicit type casts; correct it",
        ),
        (
            "i.n + i.answer",
            "types '+(BIGINT, VARCHAR)'. You might need to add explicit type casts; correct it",
        ),
        (
            "contains(r.text)",
            "types 'contains(VARCHAR)'. You might need to add explicit type casts; correct it",
        ),
        ("i.answer.part", "correct it"),
        ("anser = r.text", "there is no column anser; did you mean answer? If not, correct it"),
        ("containz(r.text)", "there is no function containz; did you mean contains? If not, correct it"),
    ],
)
def test_a_select_that_does_not_bind_is_found_in_one_sentence(score: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as raised:
        checked_select(tmp_path, score)
    said = str(raised.value)
    assert said.startswith("suites.q.score: ")
    assert says in said
    assert said.endswith(AGAIN)
    assert "Candidate" not in said
    assert "\n" not in said


def test_data_by_a_url_is_refused(tmp_path: Path) -> None:
    refused = (
        r"suites\.q: s3://team/q\.jsonl is a URL, and data of an evaluation lies on this machine; copy it"
    )
    with pytest.raises(SettingsError, match=refused):
        checked_select(tmp_path, "r.text = i.answer", data="s3://team/q.jsonl")


def test_check_asks_nothing(tmp_path: Path) -> None:
    file = tmp_path / "nightly.toml"
    file.write_text(suite("sql", f"select avg(2*contains(r.text, i.answer)) {JOINED}"))
    for more in ([], ["--check"]):
        done = commands.conserve("eval", "run", str(file), *more)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
    assert conserve.open().jobs() == []


@pytest.mark.parametrize(
    "score",
    [
        "i.n + length(r.text)",
        "i.n + i.share",
        "contains(i.tags, r.text)",
        "json_extract_string(i.tags, '$[0]') = r.text",
        "r.json.answer = i.answer",
        "i.answer::int",
        "i.n = r.text",
        "error(r.text)",
        "1 / 0",
    ],
)
def test_a_select_that_only_rows_can_refuse_passes(score: str, tmp_path: Path) -> None:
    checked_select(tmp_path, score)


@pytest.mark.parametrize(
    ("score", "fits"),
    [
        ("list_contains(i.tags, r.text)", True),
        ("i.parts.x", True),
        ("i.day < date '2021-01-01'", True),
        ("i.input_text = r.text", True),
        ("i.parts.y", False),
        ("contains(i.day, r.text)", False),
    ],
)
@pytest.mark.parametrize("more", ["", *in_full("limit = 1")])
def test_columns_of_parquet_have_their_own_types(score: str, fits: bool, more: str, tmp_path: Path) -> None:
    table(tmp_path)
    if fits:
        checked_select(tmp_path, score, data="q.parquet", more=more)
    else:
        with pytest.raises(SettingsError, match=r"score: [A-Z].*; correct it, and check with"):
            checked_select(tmp_path, score, data="q.parquet", more=more)


def test_types_are_those_of_the_rows_that_are_asked(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"question": "a", "n": "many" if n == 5 else n} for n in range(40)]
    lines(tmp_path, rows)
    checked_select(tmp_path, "i.n + length(r.text)", more="limit = 2")
    with pytest.raises(SettingsError, match=r"\+\(VARCHAR, BIGINT\)"):
        checked_select(tmp_path, "i.n + length(r.text)")


def test_of_large_data_names_alone_are_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MOST_BYTES", 1)
    checked_select(tmp_path, "2*contains(r.text, i.answer)")
    with pytest.raises(SettingsError, match=r"anser.*FILE --check"):
        checked_select(tmp_path, "i.anser = r.text")
    checked_function(tmp_path, "return row['anser'] in answer")


def test_columns_that_differ_by_case_alone_pass(tmp_path: Path) -> None:
    lines(tmp_path, [{"question": "a", "Question": "b"}])
    checked_select(tmp_path, "contains(r.text, i.question)")
    checked_function(tmp_path, "return 1")


def test_a_select_without_row_index_is_found(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"suites\.q\.score selects no column row_index; add it"):
        checked(tmp_path, suite("sql", "select 1 as one union all select 2"))
    with pytest.raises(UsageError, match="name each"):
        checked(tmp_path, suite("sql", f"select avg(r.text = 'a'), avg(r.text = 'b') {JOINED}"))
    checked(tmp_path, suite("sql", f"select row_index, 1 as exact, 0 as exact {JOINED}"))


def test_a_select_reads_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("row_index\n1\n")
    with pytest.raises(SettingsError, match="nothing else"):
        checked(tmp_path, suite("sql", f"select row_index, 1 as one from '{tmp_path / 'other.csv'}'"))


def test_a_select_that_fails_at_night_is_one_sentence(tmp_path: Path) -> None:
    said = error_of_night(tmp_path, suite("sql", f"select avg(i.answer::int) {JOINED}"))
    assert said == (
        "suites.q.score: Could not convert string 'amber' to INT32 when casting from source "
        "column answer; correct it, and check with: conserve eval run FILE --check"
    )


def test_a_mistake_that_the_check_could_not_find_is_as_short_at_night(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "MOST_BYTES", 1)
    said = error_of_night(tmp_path, suite("sql", f"select avg(2*contains(r.text, i.answer)) {JOINED}"))
    assert said == (
        "suites.q.score: No function matches the given name and argument types '*(INTEGER_LITERAL, BOOLEAN)'. "
        "You might need to add explicit type casts; correct it, and check with: conserve eval run FILE --check"
    )


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "return row['anser'] in answer",
            "line 3: KeyError: 'anser'; a row has: qid, question, answer, n, share, tags",
        ),
        (
            "return anser == answer",
            f"line 3: NameError: name 'anser' is not defined; correct it, and {AGAIN}",
        ),
        ("return answer.lowercase()", "line 3: AttributeError: 'str' object has no attribute 'lowercase'"),
        ("raise AttributeError('no NoneType')", "line 3: AttributeError: no NoneType; correct it"),
        ("return row['n'] + answer", "line 3: TypeError: unsupported operand"),
        ("import gone_module", "line 3: ModuleNotFoundError: No module named 'gone_module'"),
    ],
)
def test_a_function_that_no_answer_satisfies_is_found(body: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as raised:
        checked_function(tmp_path, body)
    assert str(raised.value).startswith(f"suites.q.score: myscore.py {says}")


def test_a_function_of_other_arguments_is_found(tmp_path: Path) -> None:
    (tmp_path / "myscore.py").write_text("\ndef score(answer):\n    return 1\n")
    with pytest.raises(SettingsError, match=r"myscore.py line 2: TypeError: score\(\) takes 1 positional"):
        checked(tmp_path, suite("python", "myscore:score"))


def test_a_mistake_in_a_module_beside_is_found_there(tmp_path: Path) -> None:
    (tmp_path / "beside_the_scores.py").write_text("def of(row):\n\n    return row['anser']\n")
    with pytest.raises(SettingsError, match=r"beside_the_scores.py line 3: KeyError: 'anser'"):
        checked_function(tmp_path, "import beside_the_scores", "return beside_the_scores.of(row)")


def test_a_scorer_is_a_module_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "words_beside_the_score.py").write_text("RIGHT = 'amber'\n")
    (tmp_path / "pickled_scores.py").write_text(
        "from __future__ import annotations\nimport pickle\nfrom dataclasses import dataclass\n"
        "from words_beside_the_score import RIGHT\n@dataclass\nclass Grade:\n    points: float\n"
        "GRADE = Grade(1.0)\ndef score(answer, row):\n"
        "    return pickle.loads(pickle.dumps(GRADE)).points if answer == RIGHT else 0\n"
    )
    first = module_of(tmp_path, "pickled_scores")
    assert module_of(tmp_path, "pickled_scores") is first, "its suites run in threads, side by side"
    assert (first.score("amber", {}), first.score("", {})) == (1.0, 0)
    (tmp_path / "pickled_scores.py").write_text("def score(answer, row): return 0.5\n")
    assert module_of(tmp_path, "pickled_scores").score("amber", {}) == 0.5
    (tmp_path / "pickled_scores.py").write_text("raise ValueError\n")
    with pytest.raises(ValueError):
        module_of(tmp_path, "pickled_scores")
    assert "pickled_scores" not in sys.modules


def test_a_scorer_takes_no_name_from_an_installed_module(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("def score(answer, row): return 0.5\n")
    assert module_of(tmp_path, "colorsys").score("", {}) == 0.5
    assert importlib.import_module("colorsys").rgb_to_hsv(0, 0, 0) == (0.0, 0.0, 0)


@pytest.mark.parametrize(
    "body",
    [
        "return float(answer)",
        "return answer.split()[0] == row['answer']",
        "return int(re.search('[0-9]+', answer)[0])",
        "return re.search('[0-9]+', answer).group() == row['n']",
        "return {'yes': 1, 'no': 0}[answer]",
        "return dict(re.findall('([a-z]+): ([a-z]+)', answer))['label'] == 'a'",
        "return json.dumps(object())",
        "raise SystemExit(3)",
        "assert answer",
        "return answer",
    ],
)
def test_a_function_that_may_refuse_a_made_up_answer_passes(body: str, tmp_path: Path) -> None:
    checked_function(tmp_path, body)


def test_a_variable_that_only_a_real_answer_sets_passes(tmp_path: Path) -> None:
    checked_function(
        tmp_path, "for word in answer.split():", "    last = word", "return last == row['answer']"
    )


@pytest.mark.parametrize("more", ["limit = 1", *in_full("")])
def test_the_row_of_the_trial_is_that_of_the_night(more: str, tmp_path: Path) -> None:
    table(tmp_path)
    written = f"with open({str(tmp_path / 'rows')!r}, 'a') as file: print(dict(row), file=file)"
    function(tmp_path, written, "return 1")
    file = tmp_path / "nightly.toml"
    file.write_text(suite("python", "myscore:score", data="q.parquet", more=more))
    assert commands.conserve("eval", "run", str(file)).returncode == 0
    trial, *night = (tmp_path / "rows").read_text().splitlines()
    assert trial == night[0]
    assert "datetime.date(2020, 1, 1)" in trial
    assert "'text': " in trial


def test_a_function_that_fails_at_night_is_named_by_its_line_and_item(tmp_path: Path) -> None:
    function(tmp_path, "if row['n'] < 2:", "    return 1", "return float(answer)")
    said = error_of_night(tmp_path, suite("python", "myscore:score", more='id = "qid"'))
    assert said.startswith(
        "suites.q.score: myscore.py line 5: ValueError: could not convert string to float: "
    )
    assert said.endswith(", of the item q2; return None where there is no score")


def test_a_key_that_a_row_lacks_comes_with_those_that_it_has(tmp_path: Path) -> None:
    function(tmp_path, "return answer and row['anser']")
    said = error_of_night(tmp_path, suite("python", "myscore:score"))
    assert said == (
        "suites.q.score: myscore.py line 3: KeyError: 'anser'; "
        "a row has: qid, question, answer, n, share, tags"
    )


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("limt = 200", "suites.q.limt; did you mean limit?"),
        ("sed = 1", "suites.q.sed; did you mean seed?"),
        ("epoch = 2", "suites.q.epoch; did you mean epochs?"),
        ("colour = 1", "suites.q.colour; there are: kind, seed, limit, epochs, worse, metrics, data, id, "),
    ],
)
def test_a_mistyped_entry_is_told_the_common_ones_too(entry: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as raised:
        checked_select(tmp_path, "r.text = i.answer", more=entry)
    assert f"there is no entry {says}" in str(raised.value)
    (plan,) = plan_of(f'[suites.q]\nkind = "lm-eval"\n{entry}').suites
    with pytest.raises(SettingsError) as raised:
        typed_options(plan, {"tasks": list})
    assert f"there is no entry {says.split(', data')[0]}" in str(raised.value)


@pytest.mark.parametrize(
    ("grades", "text", "score"),
    [
        ("'A+' = 1, A = 0.9, 'C++' = 0.5, C = 0.1", "A+", 1.0),
        ("'A+' = 1, A = 0.9, 'C++' = 0.5, C = 0.1", "Grade: a+.", 1.0),
        ("A = 0.9, 'A+' = 1", "an A, not an A+", 0.9),
        ("'C++' = 0.5, C = 0.1", "in C++", 0.5),
        ("'C++' = 0.5, C = 0.1", "in CPP, Cython", None),
        ("yes = 1, no = 0", "none but yes", 1.0),
        ("yes = 1", "-1", -1.0),
        ("yes = 1", "Rating:+7 of 10", 7.0),
        ("yes = 1", "score-8", 8.0),
        ("yes = 1", "1e-3", 0.001),
        ("yes = 1", "about .5", 0.5),
        ("yes = 1", "0.25.", 0.25),
        ("yes = 1", "v2 is worth 3", 3.0),
        ("yes = 1", "1e999", None),
    ],
)
def test_a_judge_gives_the_first_grade_or_number(
    grades: str, text: str, score: float | None, tmp_path: Path
) -> None:
    assert judge_of(tmp_path, f"grades = {{ {grades} }}").score(text) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Yes.", 1.0),
        ("no, it is not", 0.0),
        ("The answer is not correct.", None),
        ("It is not true: no.", 0.0),
        ("0.5", 0.5),
    ],
)
def test_a_judge_without_grades_says_yes_or_no(text: str, score: float | None, tmp_path: Path) -> None:
    assert judge_of(tmp_path, "").score(text) == score


@pytest.mark.parametrize(
    "text", ['{"score": NaN}', '{"score": Infinity}', '{"score": "nan"}', '{"score": null}', "7"]
)
def test_a_judge_s_field_without_a_number_is_no_score(text: str, tmp_path: Path) -> None:
    judge = judge_of(tmp_path, "field = 'score'")
    assert judge.score(text) is None
    assert judge.score('{"score": 0.5}') == 0.5


def test_a_truth_in_a_judge_s_field_is_1_or_0_unless_a_grade_says_otherwise(tmp_path: Path) -> None:
    judge = judge_of(tmp_path, "field = 'right'\nscale = 10")
    assert [judge.score(f'{{"right": {said}}}') for said in ("true", "false")] == [1.0, 0.0]
    assert judge_of(tmp_path, "field = 'right'\ngrades = { true = 5 }").score('{"right": true}') == 5.0


def facts_of_judge(folder: Path, entry: str = "", *, of_suite: str | None = None) -> dict[str, str]:
    judge = judge_of(folder, entry)
    return judge.facts(judge.target(ModelTarget(endpoint=of_suite)))


@pytest.mark.parametrize(
    "entry", ["scale = 5", "field = 'score'", "pattern = '(\\d)'", "grades = { B = 0.5 }"]
)
def test_how_a_judge_s_answer_becomes_a_score_is_a_fact(entry: str, tmp_path: Path) -> None:
    before, after = facts_of_judge(tmp_path), facts_of_judge(tmp_path, entry)
    assert {fact for fact in before if before[fact] != after[fact]} == {"scorer"}
    assert before == facts_of_judge(tmp_path, "scale = 1"), "as without it"


def test_a_judge_without_a_name_is_known_by_its_address(tmp_path: Path) -> None:
    here, there = (
        facts_of_judge(tmp_path, f"endpoint = 'http://me:secret@{host}/v1?api_key=secret'")
        for host in ("one", "two")
    )
    assert (here["judge_endpoint"], there["judge_endpoint"]) == ("http://***@one/v1", "http://***@two/v1")
    assert "secret" not in str(here)
    named, moved = (
        facts_of_judge(tmp_path, f"model = 'm'\nendpoint = 'http://{host}/v1'") for host in ("one", "two")
    )
    assert named == moved
    assert named["judge_model"] == "m"
    ours = facts_of_judge(tmp_path, of_suite="http://one/v1")
    assert (ours["judge_model"], ours["judge_endpoint"]) == ("the same", "the same")


@pytest.mark.parametrize(
    ("of_suite", "of_judge", "says"),
    [
        (
            "",
            "prompt = '{{ questoin }} {{ answer_of_model }}'",
            "judge.prompt names 'questoin', but the columns are: ",
        ),
        ("", "prompt = '{{ answer_of_model }'", "suites.q.judge.prompt: "),
        ("", "prompt = '{{ question }}'", "does not show the answer; write {{ answer_of_model }} in it"),
        ("", "prompt = '{{ answer_of_model }}'\nscale = 0", "suites.q.judge.scale divides each score"),
        (
            "",
            "prompt = '{{ answer_of_model }}'\nparams = { max_tokns = 3 }",
            "a field max_tokns; did you mean max_tokens?",
        ),
        (
            "params = { max_tokns = 3 }\n",
            "prompt = '{{ answer_of_model }}'",
            "unknown_params = true sends it all the same",
        ),
    ],
)
def test_a_judge_that_could_score_nothing_is_found_by_a_check(
    of_suite: str, of_judge: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "why"}\n')
    text = f'[suites.q]\nkind = "judge"\ndata = "q.jsonl"\nprompt = "{{{{ question }}}}"\n{of_suite}'
    with pytest.raises(SettingsError) as raised:
        checked(tmp_path, f"{text}[suites.q.judge]\n{of_judge}\n")
    assert says in str(raised.value)


def test_a_field_that_no_known_server_has_is_sent_where_the_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "why"}\n')
    more = "params = { of_my_server = 3 }\nunknown_params = true\n"
    checked(tmp_path, suite("sql", "select avg(1.0) from results", data="q.jsonl", more=more))


@pytest.mark.parametrize(
    ("pattern", "text", "score"),
    [
        (r"(\d+)/(\d+)", "I give 3/5.", 3.0),
        (r"score: (?:(\d+)|(none))", "score: 4", 4.0),
        (r"(?:score: (\d+)|grade: (\d+) of (\d+))", "grade: 2 of 6", 2.0),
        (r"\d+", "7 of 9", 7.0),
        (r"(\d+)/(\d+)", "no score", None),
    ],
)
def test_the_score_of_a_judge_is_the_first_group_that_matched(
    pattern: str, text: str, score: float | None, tmp_path: Path
) -> None:
    assert judge_of(tmp_path, f"pattern = '{pattern}'").score(text) == score
