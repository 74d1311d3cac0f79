"""MMLU five-shot by lm-eval: through the queue, by its own vLLM backend, by `local-completions` and `vllm serve`.

Needs lm-eval in front of the environment: PYTHONPATH=.evals, after `make test-evals`. Each way runs in a process of
its own, in turn, on the same weights in float32; the clock runs from the ready engine to the scores.
"""

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq

from conserve.config import load
from conserve.hosts import free_port
from tests.benchmarks.report import Figure

COMMAND = "PYTHONPATH=.evals python -m tests.benchmarks harness"
MMLU = Path(__file__).parent / "data" / "mmlu_57x20.parquet"
SUBJECTS = int(os.environ.get("HARNESS_SUBJECTS", "8"))
QUESTIONS = int(os.environ.get("HARNESS_QUESTIONS", "8"))  # of each subject
ROUNDS = int(os.environ.get("HARNESS_ROUNDS", "3"))
WAYS = ("queue", "vllm", "local-completions")
FLAGS = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 64, "enforce_eager": True}
KV_BYTES = 1 << 30
START_S = 600.0
QUESTION = "{{question}}\nA. {{choices[0]}}\nB. {{choices[1]}}\nC. {{choices[2]}}\nD. {{choices[3]}}\nAnswer:"


def measure() -> list[Figure]:
    """Run each way in turn, `ROUNDS` times."""
    with tempfile.TemporaryDirectory() as folder:
        tasks = Path(folder, "tasks")
        write_tasks(tasks)
        rounds = [{way: child(way, tasks, Path(folder, f"{n}-{way}")) for way in WAYS} for n in range(ROUNDS)]
    return [*(faster_than(other, rounds) for other in WAYS[1:]), same_scores(rounds)]


def faster_than(other: str, rounds: Sequence[Mapping[str, Any]]) -> Figure:
    """Times of another way over ours."""
    ratios = [one[other]["seconds"] / one["queue"]["seconds"] for one in rounds]
    note = ", ".join(
        f"{way} {statistics.median(one[way]['seconds'] for one in rounds):,.1f} s" for way in WAYS
    )
    return Figure(
        name=f"MMLU 5-shot by lm-eval: {other} over the queue",
        unit="times",
        samples=ratios,
        target="at least 1.0",
        reached=statistics.median(ratios) >= 1.0,
        command=COMMAND,
        note=f"{note}; {SUBJECTS * QUESTIONS} questions",
    )


def same_scores(rounds: Sequence[Mapping[str, Any]]) -> Figure:
    """Questions whose likeliest choice differs from that of lm-eval's own backend."""
    pairs = [zip(one["queue"]["chosen"], one["vllm"]["chosen"], strict=True) for one in rounds]
    differ = [float(sum(ours != theirs for ours, theirs in each)) for each in pairs]
    return Figure(
        name="MMLU 5-shot by lm-eval: other answers than its vLLM's",
        unit="",
        samples=differ,
        target="0",
        reached=not any(differ),
        command=COMMAND,
    )


def write_tasks(folder: Path) -> None:
    """Write a task for each subject: five shots of the subject, then questions."""
    folder.mkdir()
    rows = pq.read_table(MMLU).to_pylist()
    for subject in sorted({row["subject"] for row in rows})[:SUBJECTS]:
        ours = [row for row in rows if row["subject"] == subject]
        files = {}
        shots, test = ([row for row in ours if row["split"] == split] for split in ("dev", "test"))
        for name, some in (("shots", shots), ("test", test[:QUESTIONS])):
            files[name] = str(folder / f"{subject}-{name}.jsonl")
            lines = (json.dumps({key: row[key] for key in ("question", "choices", "answer")}) for row in some)
            Path(files[name]).write_text("\n".join(lines) + "\n")
        task = {
            "task": f"mmlu_{subject}", "dataset_path": "json", "dataset_kwargs": {"data_files": files},
            "test_split": "test", "fewshot_split": "shots", "fewshot_config": {"sampler": "first_n"},
            "num_fewshot": 5,
            "description": f"The following are multiple choice questions about {subject.replace('_', ' ')}.\n\n",
            "output_type": "multiple_choice", "doc_to_text": QUESTION, "doc_to_choice": ["A", "B", "C", "D"],
            "doc_to_target": "answer", "metric_list": [{"metric": "acc"}],
        }  # fmt: skip
        (folder / f"{subject}.yaml").write_text(json.dumps(task))


def child(way: str, tasks: Path, output: Path) -> Any:
    """Seconds and choices of one way, in a process of its own."""
    arguments = [sys.executable, "-m", "tests.benchmarks.harness", way, str(tasks), str(output)]
    environ = {
        "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(output.parent / "datasets"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip
    subprocess.run(arguments, env=os.environ | environ, check=True, stdout=subprocess.DEVNULL)
    return json.loads(output.read_text())


def run(way: str, tasks: Path, output: Path) -> None:
    """Evaluate by one way, and write seconds and choices."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    names = sorted(path.stem for path in tasks.glob("*.yaml"))
    with model_of(way, output) as model:
        begun = time.monotonic()
        found = lm_eval.simple_evaluate(
            model=model, tasks=[f"mmlu_{name}" for name in names], bootstrap_iters=0, log_samples=True,
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        )  # fmt: skip
        seconds = time.monotonic() - begun
    chosen = [
        max(range(4), key=lambda n: sample["resps"][n][0][0])
        for samples in found["samples"].values()
        for sample in samples
    ]
    output.write_text(json.dumps({"seconds": seconds, "chosen": chosen}))


@contextmanager
def model_of(way: str, output: Path) -> Iterator[Any]:
    """Model of lm-eval, whose engine is ready."""
    from lm_eval.api.registry import get_model

    folder = str(load().models_folder / "smollm2-135m-instruct")
    if way == "queue":
        import conserve
        from conserve.nightly.harness.lm_eval_model import ConserveLM
        from conserve.nightly.harness.model_access import engine_flags, model_tokens, settings_of
        from conserve.nightly.harness.request_jobs import Alone

        store = conserve.open(output.with_suffix(".store"))
        flags = engine_flags(f"--kv-cache-memory-bytes {KV_BYTES}", FLAGS)
        settings = settings_of(store.path, model=folder, endpoint=None, api_key=None)
        with conserve.Engine(folder, engine_args=flags, progress=False) as engine:
            queue = Alone(store, "measured", engine, name="mmlu", progress=False)
            yield ConserveLM(queue=queue, tokens=model_tokens(settings, flags=flags))
    elif way == "vllm":
        with found_as_vllm():
            yield get_model("vllm")(folder, kv_cache_memory_bytes=KV_BYTES, **FLAGS)
    else:
        with served(folder) as address:
            yield get_model("local-completions")(
                model=folder, base_url=f"{address}/v1/completions", tokenizer=folder, num_concurrent=64,
                max_length=2048,
            )  # fmt: skip


@contextmanager
def found_as_vllm() -> Iterator[None]:
    """Let lm-eval find the version of vLLM under the name `vllm`, where the distribution is `vllm-cpu`."""
    from vllm.platforms import current_platform

    assert current_platform.device_type  # vLLM looks for the distribution itself, and is to find none
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
    try:
        yield
    finally:
        importlib.metadata.version = version


@contextmanager
def served(folder: str) -> Iterator[str]:
    """Address of a `vllm serve` of the same flags."""
    port = free_port()
    flags = [word for name, value in FLAGS.items() for word in flag(name, value)]
    arguments = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", str(port),
        "--kv-cache-memory-bytes", str(KV_BYTES), *flags,
    ]  # fmt: skip
    server = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(f"http://127.0.0.1:{port}/health", server)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def flag(name: str, value: object) -> list[str]:
    """One of `FLAGS` on a command line."""
    word = f"--{name.replace('_', '-')}"
    return [word] if value is True else [word, str(value)]


def until(address: str, server: "subprocess.Popen[bytes]") -> None:
    """Wait until the server is ready."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        try:
            if httpx.get(address).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1)
    raise RuntimeError("vllm serve did not start")


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
