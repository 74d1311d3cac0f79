"""An eval of inspect_ai: repeat a text word for word."""

from pathlib import Path

import pyarrow.parquet as pq
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import f1
from inspect_ai.solver import generate

TEXTS = Path(__file__).with_name("gsm8k.parquet")
WORDS = 16  # of each text


@task  # type: ignore[untyped-decorator, unused-ignore]
def repeats() -> Task:
    """Score answers by the words that they share with the text, 0 to 1."""
    texts = [" ".join(question.split()[:WORDS]) for question in pq.read_table(TEXTS)["question"].to_pylist()]
    samples = [
        Sample(id=number, input=f"Repeat this text word for word: {text}", target=text)
        for number, text in enumerate(texts)
    ]
    return Task(dataset=samples, solver=generate(), scorer=f1())
