"""An evaluation by lm-eval through the queue in a process of its own, to be killed.

Arguments: endpoint, tokenizer, folder of tasks, names of tasks, file for the scores.
"""

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

from conserve.nightly.harness.lm_eval_model import ConserveLM


def evaluated(model: Any, tasks: Path, names: list[str], **more: Any) -> Any:
    """Results of lm-eval's own evaluation; of the tasks in this folder alone, since lm-eval's are ten thousand."""
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lm_eval.simple_evaluate(
        model=model, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=True, **more
    )


def scores(found: Any) -> dict[str, Any]:
    """Everything that the model contributes to: metrics, and each sample's requests and responses."""
    return {
        "results": found["results"],
        "samples": {
            task: [[sample["doc_id"], responses(sample), sample["arguments"]] for sample in samples]
            for task, samples in found["samples"].items()
        },
    }


def responses(sample: Any) -> list[list[Any]]:
    """Responses of a sample: texts, or numbers to the last digit."""
    return [[list(one) if isinstance(one, tuple) else one for one in each] for each in sample["resps"]]


if __name__ == "__main__":
    endpoint, tokenizer, tasks, names, output = sys.argv[1:]
    lm = ConserveLM(endpoint=endpoint, tokenizer=tokenizer, run="night")
    Path(output).write_text(
        json.dumps(scores(evaluated(lm, Path(tasks), names.split(","))), sort_keys=True, default=str)
    )
