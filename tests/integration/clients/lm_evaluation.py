"""lm-eval's `local-completions` (loglikelihoods) and `local-chat-completions`.

Arguments: URL with /v1, key, model, its folder.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

url, key, model, folder = sys.argv[1:5]
os.environ |= {
    "OPENAI_API_KEY": key,
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

import lm_eval  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

CAPITALS = [
    ("France", ["Paris", "Rome"], 0),
    ("Italy", ["Madrid", "Rome"], 1),
    ("Japan", ["Tokyo", "Oslo"], 0),
]
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "What is the capital of {{country}}?"}

with tempfile.TemporaryDirectory() as scratch:
    lines = [
        json.dumps({"country": c, "choices": choices, "label": n, "answer": choices[n]})
        for c, choices, n in CAPITALS
    ]
    data = Path(scratch, "capitals.jsonl")
    data.write_text("\n".join(lines))
    files = {"dataset_kwargs": {"data_files": {"test": str(data)}}}
    choose = {
        **COMMON, **files, "task": "choose", "output_type": "multiple_choice", "doc_to_choice": "choices",
        "doc_to_target": "label", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    write = {
        **COMMON, **files, "task": "write", "output_type": "generate_until", "doc_to_target": "answer",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 32, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    manager = TaskManager(include_path=scratch)
    common = f"model={model},num_concurrent=3,max_retries=1,tokenizer={folder}"
    by_likelihood = lm_eval.simple_evaluate(
        model="local-completions", model_args=f"{common},base_url={url}/completions", tasks=[choose],
        task_manager=manager, bootstrap_iters=0,
    )  # fmt: skip
    accuracy = by_likelihood["results"]["choose"]["acc,none"]
    assert accuracy >= 2 / 3, by_likelihood["results"]
    by_chat = lm_eval.simple_evaluate(
        model="local-chat-completions", model_args=f"{common},base_url={url}/chat/completions", tasks=[write],
        task_manager=manager, apply_chat_template=True, bootstrap_iters=0, log_samples=True,
    )  # fmt: skip
    answers = [sample["resps"][0][0] for sample in by_chat["samples"]["write"]]
    assert len(answers) == len(CAPITALS)
    assert "Paris" in answers[0], answers
