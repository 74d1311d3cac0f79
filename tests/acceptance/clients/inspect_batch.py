"""inspect_ai with a batch configuration: one evaluation, its samples as one batch. argv: base URL, rows, folder."""

import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import BatchConfig, GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

URL, ROWS, FOLDER = sys.argv[1], int(sys.argv[2]), sys.argv[3]
batch = BatchConfig(size=ROWS, send_delay=2.0, tick=0.5)
model = get_model(
    "openai/any",
    base_url=URL,
    api_key="none",
    responses_api=False,
    config=GenerateConfig(batch=batch, max_tokens=8, max_connections=ROWS),
)
samples = [Sample(input=f"q{n}", target="e") for n in range(ROWS)]
task = Task(dataset=samples, solver=generate(), scorer=includes())
print("SUBMITTED", flush=True)
(log,) = eval(task, model=model, log_dir=FOLDER, display="plain", max_samples=ROWS)
assert log.status == "success", log.error
assert len(log.samples) == ROWS
assert all(sample.output.completion and sample.error is None for sample in log.samples), log.samples[0]
print("DONE", len(log.samples))
