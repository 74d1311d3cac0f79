"""inspect_ai by its providers `openai-api` and `openai`. Arguments: URL with /v1, key, model."""

import os
import sys
import tempfile

url, key, model = sys.argv[1:4]
os.environ |= {"SERVED_BASE_URL": url, "SERVED_API_KEY": key, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}

from inspect_ai import Task, eval  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.scorer import includes  # noqa: E402
from inspect_ai.solver import generate  # noqa: E402

samples = [
    Sample(input=f"What is the capital of {country}?", target=city)
    for country, city in [("France", "Paris"), ("Italy", "Rome"), ("Japan", "Tokyo"), ("Spain", "Madrid")]
]
for name in (f"openai-api/served/{model}", f"openai/{model}"):
    task = Task(dataset=samples, solver=generate(), scorer=includes())
    with tempfile.TemporaryDirectory() as folder:
        (log,) = eval(
            task, model=name, max_tokens=32, temperature=0, log_dir=folder, display="none", max_retries=0
        )
    assert log.status == "success", (name, log.error)
    assert log.results.completed_samples == len(samples)
    assert log.results.scores[0].metrics["accuracy"].value >= 0.5, log.results
    assert log.stats.model_usage[name].output_tokens > 0
