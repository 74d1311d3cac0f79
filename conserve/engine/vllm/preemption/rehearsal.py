"""Rows that leave iterations of a small random model, beside the same rows that stay.

`python -m conserve.engine.vllm.preemption.rehearsal eager|compiled` prints whether their tokens are the same;
`compat.rehearsal` runs it on a vLLM that was never tried.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from conserve.engine.known_times import KnownTimes
from conserve.engine.policy.view import OFFLINE_PRIORITY
from conserve.engine.runtime.parent_death import follow_parent
from conserve.engine.section import EngineSection
from conserve.engine.vllm.compat.rehearsal import EAGER, FAILED, FAULT, SAME
from conserve.engine.vllm.iteration import Stamp
from conserve.engine.vllm.launching.environment import prepare_environment
from conserve.engine.vllm.settings import SCHEDULER, WORKER, entries
from conserve.profiles.conserve import ConServeModel

LAYERS, WIDTH, HEADS, INNER, VOCABULARY = 4, 128, 2, 256, 512
LIVE, ROWS = (20,), (40, 70, 100)  # tokens of the prompts
ANSWER = 8  # tokens
CHUNK = 96  # tokens of an iteration, fewer than all prompts together
MOST_REQUESTS = CHUNK // 2  # vLLM makes CUDA graphs of up to twice as many tokens: of all iterations here
DOUBT = 0.25  # nats between the two likeliest tokens; half precision may swap closer ones
LATENCY = ConServeModel.of(0.3, 1e-4, 2e-4, 1.5e-3, 0.15, 1.0, 1e-3, 15.0)
"""Any latency model: without one the scheduler lets no row leave."""
SETTINGS = EngineSection(harm=None, receipt=0.0, safepoint_every=1)


class Token(NamedTuple):
    """A token of an answer, and how much likelier it was than the next one, in nats."""

    token: int
    ahead: float


class RowsLeave:
    """Implements `safepoints.Orders`: in each second iteration one row leaves, and all before the next layer.

    Iterations that are not begun do not count: behind one that rows leave, the worker refuses what was scheduled
    ahead. Of the numbers of iterations, rows would leave in each that is begun, and never get on.
    """

    flag_readable = True

    def __init__(self) -> None:
        self.on = False
        self.joined = 0  # rows that went on where they had left
        self._iteration = self._begun = self._looks = 0

    def rows_ordered(self, stamp: Stamp) -> int:
        """Number of the stamp's first rows that are to leave; asked before each layer."""
        if stamp.iteration != self._iteration:
            self._iteration, self._looks = stamp.iteration, 0
            self._begun += 1
        self._looks += 1
        if not self.on or not stamp.rows or self._begun % 2:
            return 0
        return {1: 0, LAYERS - 2: 1}.get(self._looks, len(stamp.rows))

    def refused(self, stamp: Stamp) -> bool:
        """No iteration is refused before it starts."""
        return False

    def word(self, stamp: Stamp) -> None:
        """No word to look at: each safepoint asks."""


def main(way: str = EAGER) -> None:
    """Print whether rows that leave have the tokens of rows that stay, or what kept this from being seen."""
    follow_parent(signal.SIGKILL)
    prepare_environment(offline=True)
    # So the worker is in this process, and gets its orders here.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with tempfile.TemporaryDirectory(prefix="conserve-rehearsal-") as folder:
        try:
            fault = difference(*start(Path(folder), way))
        except Exception as error:  # whatever an unknown vLLM raises
            print(f"{FAILED}{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", flush=True)
            return
        print(SAME if fault is None else f"{FAULT}{fault}", flush=True)


def start(folder: Path, way: str = EAGER) -> tuple[Any, RowsLeave]:
    """Start an engine on a model that is written into the folder; returns it and its worker's orders."""
    from vllm import LLM
    from vllm.platforms import current_platform

    from conserve.engine.vllm.preemption import worker

    orders, outcome = RowsLeave(), worker.outcome

    def counted(*args: Any) -> Any:
        told = outcome(*args)
        orders.joined += told.joined
        return told

    worker.TensorParallelOrders = lambda: orders  # type: ignore[assignment,misc,return-value]
    worker.outcome = counted  # type: ignore[assignment]
    build_model(folder)
    right = [(ms, 1.0) for ms in range(1, 400)]
    times = KnownTimes.made_up(LATENCY, folder, of="rehearsal", residuals=right)
    small = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32" if current_platform.is_cpu() else "auto",  # else not by the kernels of real models
        enforce_eager=way == EAGER,
        max_model_len=256,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=MOST_REQUESTS,
        kv_cache_memory_bytes=64 << 20,
        gpu_memory_utilization=0.02,  # that vLLM wants free, beside other processes
        scheduling_policy="priority",
        scheduler_cls=SCHEDULER,
        worker_cls=WORKER,
        additional_config=entries(SETTINGS, times),
    )
    return small, orders


def difference(small: Any, orders: RowsLeave) -> str | None:
    """Compute answers undisturbed, then with rows that leave; returns how the second differ."""
    undisturbed = answers(small)
    orders.on, orders.joined = True, 0
    disturbed = answers(small)
    orders.on = False
    if not orders.joined:
        return "rows that are told to leave an iteration do not go on where they left"
    wrong = sum(map(differs, undisturbed, disturbed))
    return f"{wrong} of {len(undisturbed)} answers differ where rows leave iterations" if wrong else None


def differs(undisturbed: Sequence[Token], disturbed: Sequence[Token]) -> bool:
    """True if an answer has another token where there was no doubt; behind a doubtful one nothing is compared."""
    for wanted, found in zip(undisturbed, disturbed, strict=True):
        if wanted.token != found.token:
            return wanted.ahead > DOUBT
    return False


def answers(small: Any) -> list[list[Token]]:
    """Tokens of the live request and of the rows, computed together with nothing cached."""
    from vllm.sampling_params import SamplingParams

    lengths = (*LIVE, *ROWS)
    priorities = [0] * len(LIVE) + [OFFLINE_PRIORITY] * len(ROWS)
    prompts = [{"prompt_token_ids": prompt(length, seed)} for seed, length in enumerate(lengths)]
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, detokenize=False, logprobs=2)
    small.reset_prefix_cache()
    done = small.generate(prompts, params, priority=priorities, use_tqdm=False)
    return [tokens_of(one.outputs[0]) for one in done]


def tokens_of(answer: Any) -> list[Token]:
    """Tokens of vLLM's output, by how much each was ahead."""
    found = []
    for token, likely in zip(answer.token_ids, answer.logprobs, strict=True):
        first, second, *_ = sorted((one.logprob for one in likely.values()), reverse=True)
        found.append(Token(token, first - second))
    return found


def prompt(length: int, seed: int) -> list[int]:
    """Tokens that no other prompt begins with."""
    return [(seed * 97 + place * place + 3 * place) % VOCABULARY for place in range(length)]


def build_model(folder: Path) -> None:
    """Write a Llama of random weights, large enough that its next tokens are no toss-up."""
    import numpy as np
    from safetensors.numpy import save_file

    dice = np.random.default_rng(1)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Any:
        return (dice.standard_normal((rows, columns)) * scale / columns**0.5).astype(np.float32)

    ones = np.ones(WIDTH, np.float32)
    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, WIDTH, WIDTH**0.5),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(VOCABULARY, WIDTH, 4.0),
    }
    shapes = {
        **{f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"},
        **{f"mlp.{name}_proj": (INNER, WIDTH) for name in ("gate", "up")},
        "mlp.down_proj": (WIDTH, INNER),
    }
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(*shape, scale=2.0)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = ones
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 1024,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(*sys.argv[1:])
