"""bespokelabs-curator in batch mode: a list of prompts, one batch, a data set. argv: base URL, rows, folder."""

import os
import sys

URL, ROWS, FOLDER = sys.argv[1], int(sys.argv[2]), sys.argv[3]
os.environ |= {
    "OPENAI_API_KEY": "none",
    "CURATOR_CACHE_DIR": FOLDER,
    "TELEMETRY_ENABLED": "0",
    "HF_HOME": FOLDER,
}

from bespokelabs import curator  # noqa: E402

llm = curator.LLM(
    model_name="any",
    backend="openai",
    batch=True,
    backend_params={"base_url": URL, "batch_size": ROWS, "batch_check_interval": 1, "max_retries": 8},
    generation_params={"max_tokens": 8},
)
print("SUBMITTED", flush=True)
answers = llm([f"q{n}" for n in range(ROWS)])
found = answers.dataset.to_list() if hasattr(answers, "dataset") else answers.to_list()
assert len(found) == ROWS, found
assert all(row["response"] for row in found)
print("DONE", len(found))
