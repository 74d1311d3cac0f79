"""Suites of nightly.toml by lm-eval and inspect_ai run through the night's queue, and their items have scores."""

from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: make test-evals")
pytest.importorskip("inspect_ai", reason="inspect_ai is not installed: make test-evals")

import conserve
from tests import commands

TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def jetties(count=3):
    samples = [
        Sample(input=f"question {n}", target="jetty", id=n, metadata={"passage": n // 2}) for n in range(count)
    ]
    return Task(dataset=samples, solver=generate(), scorer=includes())
"""


@pytest.fixture
def file(tmp_path: Path, tasks: Path, characters: Path) -> Path:
    (tmp_path / "jetties.py").write_text(TASK)
    path = tmp_path / "nightly.toml"
    path.write_text(f"""
[model]
endpoint = "fake:?tokens=6"

[suites.harness]
kind = "lm-eval"
tasks = ["knows", "counts", "reads"]
include = "{tasks}"
tokenizer = "{characters}"

[suites.agents]
kind = "inspect"
task = "jetties.py@jetties"
args = {{ count = 5 }}
group = "passage"
epochs = 2
""")
    return path


def test_both_kinds_have_items_with_scores_and_share_the_queue(file: Path) -> None:
    done = commands.conserve("eval", "run", str(file), CONSERVE_FAKE="1")
    assert done.returncode == 0, done.stderr
    items = (
        conserve.open()
        .sql("select suite, item, epoch, prompt, answer, expected, source from eval_items")
        .fetchall()
    )
    harness = {row[1]: row for row in items if row[0] == "harness"}
    assert {name.partition("/")[0] for name in harness} == {"knows", "counts", "reads"}
    assert harness["knows/0"][3].endswith("Answer:")
    assert harness["knows/0"][4] in "ABCD"
    assert harness["counts/1"][5] == "2"
    agents = [row for row in items if row[0] == "agents"]
    assert sorted((row[1], row[2]) for row in agents) == [(str(n), e) for n in range(5) for e in range(2)]
    assert {row[6] for row in agents} == {"0", "1", "2"}
    scores = conserve.open().sql("select suite, metric from eval_scores").fetchall()
    assert {(row[0], row[1]) for row in scores} >= {
        ("harness", "acc"), ("harness", "exact_match"), ("harness", "bits_per_byte"), ("agents", "includes"),
    }  # fmt: skip


def test_suites_of_inspect_run_one_after_the_other(file: Path) -> None:
    begin, agents = file.read_text().split("[suites.agents]")
    other = agents.replace("count = 5", "count = 2")
    file.write_text(f"{begin.split('[suites.')[0]}[suites.agents]{agents}[suites.others]{other}")
    done = commands.conserve("eval", "run", str(file), CONSERVE_FAKE="1")
    assert done.returncode == 0, done.stderr
    counts = conserve.open().sql("select suite, count(*) from eval_items group by 1 order by 1").fetchall()
    assert counts == [("agents", 10), ("others", 4)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('"knows", ', '"nose", '), "there is no task 'nose'"),
        (("jetties.py@", "gone.py@"), "there is no file"),
        (("group = ", "grupe = "), "did you mean group?"),
        (('tokenizer = "', 'max_length = "'), "max_length is of type int"),
    ],
)
def test_a_mistake_in_the_file_is_told_before_anything_is_asked(
    file: Path, change: tuple[str, str], says: str
) -> None:
    file.write_text(file.read_text().replace(*change))
    done = commands.conserve("eval", "run", str(file), CONSERVE_FAKE="1")
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())
    assert conserve.open().jobs() == []
