"""A small evaluation for tests: questions, a nightly.toml of suites without a harness, and the fake's answers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from conserve.endpoints.fake import WORDS
from conserve.evals.outcome import Item
from conserve.evals.records import MeanScore, RunRecord, RunState, SuiteRecord
from conserve.nightly import keeping

SUITES = {
    "sql": """
kind = "sql"
data = "questions.jsonl"
prompt = "{{ question }}"
expected = "answer"
score = "select avg(r.text ilike '%' || i.answer || '%') from results r join inputs i using (job_id, row_index)"
""",
    "python": """
kind = "python"
data = "questions.jsonl"
prompt = "{{ question }} again"
score = "scorers:words"
epochs = 2
""",
    "schema": """
kind = "schema"
data = "questions.jsonl"
prompt = "{{ question }} as JSON"
schema = "answer.json"
limit = 5
""",
    "judge": """
kind = "judge"
data = "questions.jsonl"
prompt = "{{ question }} judged"
group = "topic"
[suites.judge.judge]
prompt = "Right? {{ question }}: {{ answer_of_model }}"
grades = { GRADES }
""".replace("GRADES", ", ".join(f"{word} = {n % 2}" for n, word in enumerate(WORDS))),
}
SCORER = """
def words(answer, row):
    return {"hit": row["answer"] in answer, "length": len(answer.split()) / 10}
"""

PLAN = 'name = "small"\nworse.effect = 0.1\n[suites.sql]\nkind = "sql"\n'


def written(folder: Path, *, suites: Sequence[str] = ("sql",), rows: int = 40, top: str = "") -> Path:
    """Write an evaluation of these suites; returns its nightly.toml."""
    questions = [
        {"question": f"question {n}", "answer": WORDS[n % len(WORDS)], "topic": n // 4} for n in range(rows)
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    (folder / "scorers.py").write_text(SCORER)
    (folder / "answer.json").write_text('{"type": "object"}')
    file = folder / "nightly.toml"
    tables = "".join(f"[suites.{name}]{SUITES[name]}" for name in suites)
    file.write_text(f'name = "small"\n{top}\n{tables}')
    return file


def kept(
    home: Path,
    scores: Sequence[float],
    *,
    began_at: float,
    plan: str = PLAN,
    unanswered: int = 0,
    evaluation: str = "small",
    facts: Mapping[str, str] = {"seed": "0"},
) -> RunRecord:
    """Keep a finished run of one suite whose items have these scores; the first ones may lack an answer."""
    run = RunRecord(
        id=keeping.new_id(home, evaluation, now=began_at),
        evaluation=evaluation,
        state=RunState.FINISHED,
        began_at=began_at,
        ended_at=began_at + 60.0,
        plan=plan,
        folder=str(home),
    )
    items = [
        Item(id=str(n), prompt=f"question {n}", answer=f"answer {score:g}", scores={"score": score})
        for n, score in enumerate(scores)
    ]
    items[:unanswered] = [replace(item, answer=None, scores={}, error="none") for item in items[:unanswered]]
    keeping.write_items(home, run.id, "items-sql.parquet", "sql", items)
    mean = sum(scores) / len(scores)
    score = MeanScore(metric="score", mean=mean, low=mean - 0.05, high=mean + 0.05, items=len(scores))
    suite = SuiteRecord(
        name="sql",
        kind="sql",
        scores=(score,),
        items=len(scores),
        file="items-sql.parquet",
        facts=facts,
    )
    run = keeping.with_suite(run, suite)
    keeping.write(home, run)
    return run
