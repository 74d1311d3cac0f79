"""Children of the steps: `python -m tools.gpu.within rows|smoke|copies ...`. Each prints JSON at once."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.gpu import words
from tools.gpu.children import conserve
from tools.gpu.server import VOCABULARY

REPEATS = 3
PRODUCTS = 40


def rows(path: str, *numbers: str) -> None:
    """Write offline rows of random tokens and submit them."""
    count, least_in, most_in, least_out, most_out, first, last = map(int, numbers)
    chance, target = random.Random(0), Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    ids = [str(number) for number in range(first, last)]
    with target.open("w") as file:
        for number in range(count):
            prompt = ", ".join(chance.choices(ids, k=chance.randint(least_in, most_in)))
            answer = chance.randint(least_out, most_out)
            file.write(
                f'{{"custom_id": "row-{number}", "method": "POST", "url": "/v1/completions", "body": '
                f'{{"model": "any", "prompt": [{prompt}], "max_tokens": {answer}, "temperature": 0, '
                f'"ignore_eos": true}}}}\n'
            )
    subprocess.run(conserve("submit", path, "--order", "input"), check=True)


def smoke(model: str, batch: str, *flags: str) -> None:
    """Generate with stock vLLM: a first request, a batch, one request."""
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    began = time.monotonic()
    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--model", model, *flags])
    given = {flag.lstrip("-").split("=")[0].replace("-", "_") for flag in flags if flag.startswith("--")}
    llm = LLM(model=model, **{name: value for name, value in vars(parsed).items() if name in given})
    tell({"started_s": round(time.monotonic() - began, 1)})
    count, prompt, wanted = json.loads(batch)
    ids = range(*VOCABULARY)
    prompts = [{"prompt_token_ids": random.Random(number).choices(ids, k=prompt)} for number in range(count)]
    for name, some, tokens in (
        ("first", prompts[:1], 4),
        ("batch", prompts, wanted),
        ("one", prompts[:1], wanted),
    ):
        began = time.monotonic()
        how = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        made = sum(len(answer.outputs[0].token_ids) for answer in llm.generate(some, how, use_tqdm=False))
        took = time.monotonic() - began
        tell({name: {"s": round(took, 3), "tokens": made, "tokens_per_s": round(made / took, 1)}})


def copies(num_bytes: str, side: str) -> None:
    """Time copies in both directions, alone and beside matrix products; on a CPU a thread copies."""
    import torch

    size, cuda = int(num_bytes), torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    host = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    matrix = torch.randn(int(side), int(side), device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    start = on_stream(torch.cuda.Stream()) if cuda else in_thread()

    def products() -> None:
        for _ in range(PRODUCTS):
            matrix @ matrix

    def timed(copy: Callable[[], Any] | None, beside: Callable[[], None] | None) -> float:
        """Shortest of some trials, in ms."""
        trials = []
        for _ in range(REPEATS + 1):  # the first one warms up
            synchronize(cuda)
            began = time.perf_counter()
            wait = start(copy) if copy else None
            if beside:
                beside()
            if wait:
                wait()
            synchronize(cuda)
            trials.append(1000 * (time.perf_counter() - began))
        return min(trials[1:])

    tell({"device": torch.cuda.get_device_name() if cuda else "cpu", "bytes": size})
    ways: dict[str, Callable[[], Any]] = {
        "to_host": lambda: host.copy_(there, non_blocking=True),
        "to_device": lambda: there.copy_(host, non_blocking=True),
    }
    for name, copy in ways.items():
        copy_ms, products_ms, both_ms = timed(copy, None), timed(None, products), timed(copy, products)
        tell({name: {
            "gb_per_s": round(size / copy_ms / 1e6, 2), "copy_ms": round(copy_ms, 2),
            "products_ms": round(products_ms, 2), "both_ms": round(both_ms, 2),
            "hidden": words.hidden(copy_ms, products_ms, both_ms),
        }})  # fmt: skip


Starter = Callable[[Callable[[], Any]], Callable[[], Any]]


def on_stream(stream: Any) -> Starter:
    """Start copies on a CUDA stream; `synchronize` waits for them."""
    import torch

    def start(copy: Callable[[], Any]) -> Callable[[], Any]:
        with torch.cuda.stream(stream):
            copy()
        return lambda: None

    return start


def in_thread() -> Starter:
    """Start copies in a thread."""
    pool = ThreadPoolExecutor(1)
    return lambda copy: pool.submit(copy).result


def synchronize(cuda: bool) -> None:
    """Wait for the device's streams."""
    if cuda:
        import torch

        torch.cuda.synchronize()


def tell(found: dict[str, Any]) -> None:
    """Print findings on a line of their own; libraries may have left theirs open."""
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    CHILDREN: dict[str, Callable[..., None]] = {"rows": rows, "smoke": smoke, "copies": copies}
    CHILDREN[sys.argv[1]](*sys.argv[2:])
