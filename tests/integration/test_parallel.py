"""Tensor-parallel ranks, a process each: iterations left alike, a checkpoint's shard each, and answers as ever."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import LAYERS
from tests.warned import OF_VLLM

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    *OF_VLLM,
]

ENOUGH = 40  # preemptions
LOSSES = 20  # of a row's memory
WITHIN_S = 240.0  # reached by a hang alone
SETTINGS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # it would bind each rank to a NUMA node of its own; there is one
    "OMP_NUM_THREADS": "1",
    "CONSERVE_FORK_SERVER": "1",  # that of the ranks ends with them
}


class Ranks:
    """An engine core in this process with a worker process for each rank, and what every rank did."""

    def __init__(self, model: Path, *, eager: bool = True, **parallel: int) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from conserve.engine.vllm.launching import fork_server
        from conserve.engine.vllm.settings import SCHEDULER, WORKER, entries
        from tests.bare_scheduler import known_times, section_of
        from tests.integration.test_checkpoints import transfer

        config = EngineArgs(
            model=str(model),
            **parallel,
            max_model_len=1024,
            max_num_batched_tokens=512,
            max_num_seqs=16,
            block_size=32,
            kv_cache_memory_bytes=32 << 20,
            enable_prefix_caching=True,
            enforce_eager=eager,
            dtype="float32",
            scheduling_policy="priority",
            scheduler_cls=SCHEDULER,
            worker_cls=WORKER,
            additional_config=entries(section_of(safepoint_every=1), known_times()),
            kv_transfer_config=transfer({"policy": "eager", "host_bytes": 64 << 20}),
        ).create_engine_config()
        fork_server.prepare(config)  # of which each rank is forked: it imports vLLM once
        self.llm = LLMEngine.from_vllm_config(config)
        self.core = self.llm.engine_core.engine_core
        self.preemptions = self.core.scheduler.arrival_monitor
        self.outcomes: list[Any] = []  # of iterations that rows left
        self.each(note_outcomes)

    def step(self, answers: dict[str, Sequence[int]]) -> None:
        """One iteration; the ranks agree on what became of it."""
        for output in self.llm.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
        first, second = self.each(lambda wrapper: wrapper.worker.noted)
        assert first == second
        if first is not None and first.left:
            self.outcomes.append(first)

    def each(self, work: Any) -> list[Any]:
        """Results of `work`, one of each rank."""
        results: list[Any] = self.core.model_executor.collective_rpc(work)
        return results

    def answers(
        self, asked: Sequence[Any], between: Callable[[], None] = lambda: None
    ) -> dict[str, Sequence[int]]:
        """All at once, with nothing cached; `between` is called between two iterations."""
        from conserve.engine.policy.view import OFFLINE_PRIORITY

        assert self.llm.reset_prefix_cache()
        answers: dict[str, Sequence[int]] = {}
        for ask in asked:
            question = {"prompt_token_ids": list(ask.prompt)}
            priority = OFFLINE_PRIORITY if ask.offline else 0
            self.llm.add_request(ask.name, question, ask.params.clone(), priority=priority)
        while self.busy:
            self.step(answers)
            between()
        return answers

    @property
    def busy(self) -> bool:
        """True if a step is needed, be it for copies under way, which hold blocks."""
        return bool(self.llm.has_unfinished_requests() or self.core.scheduler.has_requests())

    def saved_rows(self) -> list[Any]:
        """Rows that run and have a checkpoint."""
        scheduler = self.core.scheduler
        saved = scheduler.checkpoints.saved.tokens
        return [
            row for row in scheduler.running if row.request_id in scheduler.offline and saved(row.request_id)
        ]

    def take_memory(self, row: Any) -> None:
        """Raise the flag as for an online request."""
        self.core.scheduler.running.remove(row)
        self.core.scheduler._preempt_request(row, time.monotonic())

    @contextmanager
    def disturbed(self, seed: int) -> Iterator[None]:
        """Raise the real flag in another thread, at random moments, for random numbers of rows."""
        stop = threading.Event()
        thread = threading.Thread(target=self._disturb, args=(random.Random(seed), stop))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _disturb(self, dice: random.Random, stop: threading.Event) -> None:
        from conserve.engine.runtime.safepoint import ALL_ROWS

        while not stop.wait(dice.uniform(0.0, 0.03)):
            running = next(iter(self.preemptions._in_flight), None)
            if running is None:
                continue
            some = dice.choice([len(running.rows), dice.randint(1, len(running.rows)), ALL_ROWS])
            running.asked, running.raised_at = some, time.monotonic()
            self.preemptions._flag.raise_for(running.stamp.iteration, some)

    def close(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        from conserve.engine.vllm.launching import fork_server

        self.core.shutdown()
        del self.llm, self.core, self.preemptions
        fork_server.release(self)
        cleanup_dist_env_and_memory()


def note_outcomes(wrapper: Any) -> None:
    """Keep the outcome of a rank's last iteration, which goes with its results."""
    worker = wrapper.worker
    worker.noted, answered = None, worker._answered

    def noting(output: Any) -> Any:
        worker.noted = worker._outcome
        return answered(output)

    worker._answered = noting


@pytest.fixture(scope="module")
def ranks(six_layers: Path) -> Iterator[Ranks]:
    from tests.preempted_engine import ENVIRONMENT

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, **SETTINGS}.items():
            patch.setenv(name, value)
        ranks = Ranks(six_layers, tensor_parallel_size=2)
        yield ranks
        ranks.close()


def rows(seed: int) -> list[Any]:
    """Two online requests, and offline ones with several chunks of prompt."""
    from tests.preempted_engine import Ask, greedy, prompt

    online = [Ask(f"on{n}", prompt(20 + n, seed + n), greedy(16), offline=False) for n in range(2)]
    offline = [Ask(f"off{n}", prompt(60 + 150 * n, seed + 10 + n), greedy(6 + n)) for n in range(6)]
    return [*online, *offline]


def test_the_first_rank_reads_the_flag_for_both(ranks: Ranks) -> None:
    def orders(wrapper: Any) -> tuple[int, bool]:
        found = wrapper.worker._safepoints._orders
        return found._group.rank_in_group, found._alone

    assert ranks.each(orders) == [(0, False), (1, False)]


def test_both_ranks_leave_alike_and_answers_stay_what_they_were(ranks: Ranks) -> None:
    asked = rows(1)
    wanted: Mapping[str, Sequence[int]] = {}
    for ask in asked:
        wanted |= ranks.answers([ask])
    assert len({tuple(answer) for answer in wanted.values()}) == len(asked)
    assert not ranks.outcomes
    end = time.monotonic() + WITHIN_S
    seed = 0
    with ranks.disturbed(seed=1):
        while len(ranks.outcomes) < ENOUGH and time.monotonic() < end:
            seed += 1
            assert ranks.answers(asked) == wanted
    assert len(ranks.outcomes) >= ENOUGH
    assert len({outcome.layers_run for outcome in ranks.outcomes}) > LAYERS // 2, "at any layer"
    whole = ranks.preemptions.counts.abandoned
    assert 0 < whole < len(ranks.outcomes), "all at once, and some while others went on"
    assert ranks.answers(asked) == wanted


@pytest.mark.full
def test_each_rank_brings_back_its_shard(ranks: Ranks) -> None:
    def loaded(wrapper: Any) -> int:
        from conserve.engine.vllm.checkpoint.spill_worker import copies_here

        return int(copies_here()._backend.thread.loaded.blocks)

    asked = rows(40)
    wanted: Mapping[str, Sequence[int]] = {}
    for ask in asked:
        wanted |= ranks.answers([ask])
    dice, lost = random.Random(4), 0

    def lose() -> None:
        nonlocal lost
        if (rows := ranks.saved_rows()) and dice.random() < 0.4:
            ranks.take_memory(dice.choice(rows))
            lost += 1

    before = ranks.core.scheduler.conserve()["checkpoint"]
    end = time.monotonic() + WITHIN_S
    while lost < LOSSES and time.monotonic() < end:
        assert ranks.answers(asked, lose) == wanted
    assert lost >= LOSSES
    after = ranks.core.scheduler.conserve()["checkpoint"]
    assert after["tokens_restored"] > before["tokens_restored"]
    assert after["blocks_failed"] == 0
    first, second = ranks.each(loaded)
    assert first == second == after["blocks_restored"]
