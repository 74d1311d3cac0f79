"""vLLM's scheduler with our policy, no executor, and outcomes of iterations that rows leave, made up at random."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from conserve.engine.vllm.iteration import IterationOutcome, put, stamp_of
from conserve.engine.vllm.settings import WORKER
from tests.bare_scheduler import BareEngine, Clock, engine_config

LAYERS = 6


class PreemptedScheduler(BareEngine):
    """In two iterations of three rows leave: the first of the stamp's, or all of them."""

    def __init__(self, folder: Path, clock: Clock, *, blocks: int, seed: int) -> None:
        config = engine_config(
            folder,
            section={"policy": "conserve"},
            block_size=16,
            max_num_seqs=12,
            max_num_batched_tokens=256,
        )
        config.parallel_config.worker_cls = WORKER
        super().__init__(config, num_blocks=blocks, clock=clock)
        assert self.scheduler.arrival_monitor.enabled
        self.requests: list[Request] = []
        self.prompts: dict[str, int] = {}  # numbers of tokens
        self.tokens: Counter[str] = Counter()
        self.offline_computed = 0
        self.offline_work = 0.0
        self.aborted: set[str] = set()
        self.abort_one_while_it_runs = False
        self._dice = random.Random(seed)

    def add(self, *args: Any, **rest: Any) -> Request:
        made = super().add(*args, **rest)
        self.requests.append(made)
        self.prompts[made.request_id] = made.num_prompt_tokens
        return made

    def result(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Results that the worker would have brought, had these rows left."""
        result, stamp, dice = super().result(output), stamp_of(output), self._dice
        if stamp is None or not stamp.rows or dice.random() < 0.33:
            if stamp is not None:
                put(result, IterationOutcome(layers=LAYERS, safepoints=LAYERS, separable=True))
            return result
        left = frozenset(stamp.rows[: dice.randint(1, len(stamp.rows))])
        if dice.random() < 0.05:
            left = frozenset(output.num_scheduled_tokens)
        for name in left:
            result.sampled_token_ids[result.req_id_to_index[name]] = []
        ran = dice.randrange(LAYERS)
        kept = {name: dice.randrange(ran, LAYERS) for name in sorted(left) if dice.random() < 0.5}
        outcome = IterationOutcome(
            left=left, kept=kept, layers_run=ran, layers=LAYERS, safepoints=LAYERS, separable=True
        )
        put(result, outcome)
        return result

    def _work(self, name: str, tokens: int, reached: int) -> float:
        """Settle a row that keeps its memory."""
        context = reached - tokens
        is_decode = context >= self.prompts[name]
        return self.scheduler.iterations.worth.of(1, context) if is_decode else float(tokens)

    def finish(self, output: SchedulerOutput) -> Any:
        """Settle the output, and see that the counters of rows that left are where they were, and no others."""
        scheduler = self.scheduler
        reached = {name: request.num_computed_tokens for name, request in scheduler.requests.items()}
        if self.abort_one_while_it_runs and output.num_scheduled_tokens:
            self.abort_one_while_it_runs = False
            victim = self._dice.choice(sorted(output.num_scheduled_tokens))
            self.abort([scheduler.requests[victim]])
            self.aborted.add(victim)
        computed = {name: request.num_computed_tokens for name, request in scheduler.requests.items()}
        result = self.result(output)
        outcome = getattr(result, "conserve", None)
        left = outcome.left if outcome is not None else frozenset()
        updated = scheduler.update_from_output(output, result)
        scheduler.books.catch_up()
        for outputs in updated.values():
            for answer in outputs.outputs:
                self.tokens[answer.request_id] += len(answer.new_token_ids)
        for name, tokens in output.num_scheduled_tokens.items():
            offline = name.startswith("off")
            if name not in left or name in self.aborted:
                self.offline_computed += tokens * offline  # an aborted row's are not uncounted
                self.offline_work += self._work(name, tokens, reached[name]) * offline
            request = scheduler.requests.get(name)
            if request is not None:
                assert request.num_computed_tokens == computed[name] - tokens * (name in left)
                assert request.num_in_flight_tokens == 0
                (blocks,) = scheduler.kv_cache_manager.get_block_ids(name)
                assert len(blocks) * 16 >= request.num_computed_tokens
        return updated
