"""vLLM's asynchronous scheduler with our policy, and a worker that is counters alone: rows leave at random.

The worker keeps what vLLM's V2 runner has on the device: how many tokens of each request are computed, and what
each KV block holds, and which images were encoded. It refuses what `Worker` refuses. So every iteration that it
computes must be planned with exactly the tokens that it has, every KV block that is registered for reuse must hold
what its hash says, and every image in a chunk must have been encoded.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from conserve.engine.vllm.iteration import IterationOutcome, put, stamp_of
from conserve.engine.vllm.scheduling.scheduler import CoServing
from conserve.engine.vllm.settings import WORKER
from tests.bare_scheduler import BareEngine, Clock, engine_config

LAYERS = 6
BLOCK = 16  # tokens
LATER = b""  # hash of a block with tokens that the scheduler does not know yet


@contextmanager
def beside_online_requests() -> Iterator[None]:
    """Meanwhile, schedule ahead whatever requests there are."""
    ahead = property(lambda scheduler: scheduler.arrival_monitor.workers_read_flag)
    with mock.patch.object(CoServing, "offline_alone", ahead):
        yield


class ScheduledAhead(BareEngine):
    """Steps as vLLM's engine core does with a queue of two batches."""

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        *,
        blocks: int,
        seed: int,
        often: float = 0.3,
        separable: bool = True,
        refuses: bool = True,
        tbt_ms: float | None = None,
        slots: int = 12,
        **flags: Any,
    ) -> None:
        """Rows leave iterations with the probability `often`; if it `refuses`, one in ten is refused.

        With a `tbt_ms` as short as a few iterations, these are scheduled ahead beside online requests too.
        """
        config = engine_config(
            folder,
            section={"policy": "conserve", "ttft_slo_ms": 1500, "tbt_slo_ms": tbt_ms},
            block_size=BLOCK,
            max_num_seqs=slots,
            max_num_batched_tokens=256,
            **flags,
        )
        config.parallel_config.worker_cls = WORKER
        config.scheduler_config.async_scheduling = True
        with mock.patch.dict("os.environ", VLLM_USE_V2_MODEL_RUNNER="1"):
            super().__init__(config, num_blocks=blocks, clock=clock)
        assert self.scheduler.arrival_monitor.enabled
        self.tokens: Counter[str] = Counter()
        self.computed: Counter[str] = Counter()  # tokens of each request, on the device
        self.offline_computed = 0
        self.live_again = 0  # live tokens of iterations that were begun and left
        self.most_in_flight = 0
        self._queue: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._holds: dict[int, bytes] = {}  # KV block -> hash of what was written into it
        self._images: dict[str, list[Any]] = {}  # request -> its images
        self._encoded: set[str] = set()  # images in the encoder cache on the device
        self._unsettled: dict[str, int] = {}
        self._dice, self._often, self._separable = random.Random(seed), often, separable
        self._refuses = refuses

    @property
    def busy(self) -> bool:
        """True if a step has something to do."""
        return bool(self._queue or self.scheduler.has_requests())

    @property
    def queued(self) -> int:
        """Iterations that were run and not settled."""
        return len(self._queue)

    def step(self) -> Any:
        """Step like `EngineCore.step_with_batch_queue`."""
        if self.scheduler.has_requests():
            output: SchedulerOutput = self.scheduler.schedule()
            self.clock.now += 1e-3
            self.run(output, refused=self._refused(output), left=self._leaving(output))
            self.most_in_flight = max(self.most_in_flight, len(self._queue))
            if len(self._queue) < 2 and output.total_num_scheduled_tokens:
                return
        if self._queue:
            self.take_in()

    def evict(self, request: Request) -> None:
        """Take a running request's KV blocks back, as a plan does, maybe while iterations compute it."""
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, self.clock.monotonic())

    def take_in(self) -> None:
        """Settle the oldest iteration."""
        for outputs in self.scheduler.update_from_output(*self._queue.popleft()).values():
            for answer in outputs.outputs:
                self.tokens[answer.request_id] += len(answer.new_token_ids)
        self._check_registered()

    # The worker.

    def run(
        self, output: SchedulerOutput, *, refused: bool = False, left: frozenset[str] = frozenset()
    ) -> None:
        """Run an iteration, unless it is refused or was planned with tokens that left; these rows leave it."""
        stamp, names = stamp_of(output), list(output.num_scheduled_tokens)
        for request in output.scheduled_new_reqs:
            self.computed[request.req_id] = request.num_computed_tokens
            self._images[request.req_id] = request.mm_features
        self._encoded.difference_update(output.free_encoder_mm_hashes)
        if stamp is not None:
            self._unsettled = {name: at for name, at in self._unsettled.items() if at > stamp.settled}
            if stamp.ahead and (refused or not self._unsettled.keys().isdisjoint(names)):
                refused, left = True, frozenset(names)
                self._unsettled = {**dict.fromkeys(names, stamp.iteration), **self._unsettled}
            else:
                refused = False
                self._unsettled |= dict.fromkeys(left, stamp.iteration)
                self.live_again += sum(name.startswith("on") for name in left)
        if not refused:
            self._encode(output)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[[] if name in left else self._compute(output, name) for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        if stamp is not None:
            can = {"layers": LAYERS, "safepoints": LAYERS, "separable": self._separable}
            put(result, IterationOutcome(left=left, refused=refused, **can))
        self._queue.append((output, result))

    def _encode(self, output: SchedulerOutput) -> None:
        """Encode what is to be encoded; vLLM's worker ends with the engine where an image of a chunk is missing."""
        for name, numbers in output.scheduled_encoder_inputs.items():
            self._encoded.update(self._images[name][number].identifier for number in numbers)
        for name, tokens in output.num_scheduled_tokens.items():
            first = self._context(output, name)
            for image in self._images[name]:
                place = image.mm_position
                if first < place.offset + place.length and place.offset < first + tokens:
                    assert image.identifier in self._encoded, f"{name} has an image that was not encoded"

    def _refused(self, output: SchedulerOutput) -> bool:
        return self._refuses and self._dice.random() < 0.1

    def _leaving(self, output: SchedulerOutput) -> frozenset[str]:
        stamp = stamp_of(output)
        if stamp is None or not stamp.rows or self._dice.random() > self._often:
            return frozenset()
        most = len(stamp.rows)
        return frozenset(stamp.rows[: self._dice.randint(1, most) if self._separable else most])

    def _compute(self, output: SchedulerOutput, name: str) -> list[int]:
        """Move the device's counter, write KV, and sample a 7 if the request is due a token."""
        told, tokens = self._context(output, name), output.num_scheduled_tokens[name]
        assert told == self.computed[name], f"{name} was planned with tokens that it has not"
        self.computed[name] += tokens
        if name.startswith("off"):
            self.offline_computed += tokens
        request = self.scheduler.requests.get(name)
        if request is None:
            return [7]
        (ids,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        for place in range(told // BLOCK, self.computed[name] // BLOCK):
            known = place < len(request.block_hashes)
            self._holds[ids[place]] = request.block_hashes[place] if known else LATER
        return [7] if self.computed[name] >= request.num_tokens + self._sampled_ahead(name) else []

    def _sampled_ahead(self, name: str) -> int:
        """Tokens that iterations in the queue have sampled, which the scheduler has not seen."""
        results = (result for _, result in self._queue if name in result.req_id_to_index)
        return sum(len(result.sampled_token_ids[result.req_id_to_index[name]]) for result in results)

    @staticmethod
    def _context(output: SchedulerOutput, name: str) -> int:
        for request in output.scheduled_new_reqs:
            if request.req_id == name:
                return int(request.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        return int(cached.num_computed_tokens[cached.req_ids.index(name)])

    def _check_registered(self) -> None:
        for block in self.scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is not None:
                holds = self._holds.get(block.block_id)
                assert holds in (get_block_hash(block.block_hash), LATER), "registered, and not computed"
