"""vLLM's engine in this process, with our scheduler and worker, whose iterations a test can preempt at will."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import os
import pickle
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from vllm import _custom_ops
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.sample import sampler

from conserve.engine.policy.view import OFFLINE_PRIORITY
from conserve.engine.runtime.machine import compute_threads
from conserve.engine.runtime.safepoint import ALL_ROWS
from conserve.engine.vllm.iteration import Stamp, outcome_of
from conserve.engine.vllm.launching.number_format import computing_on
from conserve.engine.vllm.preemption import cpu_pieces
from conserve.engine.vllm.preemption.worker import Worker as OurWorker
from conserve.engine.vllm.settings import SCHEDULER, WORKER, entries
from tests.asked_orders import Asking
from tests.bare_scheduler import known_times, section_of

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
BLOCK = 32  # tokens, the least on a CPU
CHUNK = 256  # tokens of an iteration
FIRST, LAST = 100, 2000  # of the tokens that prompts are made of; all models have more
NOISE = 5.0  # in KV blocks of tokens that were not computed
ALL = -1  # offline rows
MOST_STEPS = 4000  # far more than requests take
Decide = Callable[
    [Stamp, int], int
]  # of an iteration's stamp and a layer: how many rows are to leave by then
Order = tuple[int, int]  # before which layer, and how many rows in all


class Scripted(Asking):
    """Implements `safepoints.Orders`: what the test says, at exactly the layer that it says."""

    def __init__(self) -> None:
        self.decide: Decide | None = None
        self.refuse: Callable[[Stamp], bool] | None = None
        self.layer = 0  # as of now; counts the questions, so every layer must ask
        self.iterations = 0  # that were asked about
        self._iteration = 0

    def asked(self, stamp: Stamp) -> int:
        if not stamp.rows:
            return 0
        if stamp.iteration != self._iteration:
            self._iteration, self.layer = stamp.iteration, -1
            self.iterations += 1
        self.layer += 1
        return self.decide(stamp, self.layer) if self.decide is not None else 0

    def refused(self, stamp: Stamp) -> bool:
        """An iteration that was scheduled ahead may be refused by a decision of its own."""
        return self.refuse is not None and self.refuse(stamp)

    def follow(self, decide: Decide | None) -> None:
        """From the next iteration on, which is the first again."""
        self.decide, self.iterations = decide, 0

    def script(self, orders: Mapping[int, Sequence[Order]]) -> Decide:
        """Orders by iteration, counted from 1 and only where rows may leave."""
        return lambda stamp, layer: by_now(orders.get(self.iterations, ()), stamp, layer)


def by_now(orders: Sequence[Order], stamp: Stamp, layer: int) -> int:
    """Number of rows that are to have left; orders stay, as the flag does."""
    numbers = [rows for before, rows in orders if before <= layer]
    return max((len(stamp.rows) if rows == ALL else rows for rows in numbers), default=0)


class Dice:
    """Decides at random: mostly some rows leave, now and then more of them later, or all of them."""

    def __init__(self, seed: int, layers: int, *, often: float = 0.8, whole: float = 0.05) -> None:
        self._dice, self._layers, self._often, self._whole = random.Random(seed), layers, often, whole
        self._orders: list[Order] = []

    def __call__(self, stamp: Stamp, layer: int) -> int:
        if not layer:
            self._orders = list(self._throw(len(stamp.rows)))
        return by_now(self._orders, stamp, layer)

    def _throw(self, rows: int) -> Iterator[Order]:
        dice = self._dice
        while dice.random() < self._often:
            some = dice.choice([rows, dice.randint(1, rows)])
            yield dice.randrange(self._layers), ALL_ROWS if dice.random() < self._whole else some


class Ask(NamedTuple):
    """A request that a test makes."""

    name: str
    prompt: Sequence[int]
    params: SamplingParams
    offline: bool = True
    adapter: Any = None  # a LoRARequest
    media: Mapping[str, Any] | None = None  # vLLM's multi_modal_data

    @property
    def question(self) -> dict[str, Any]:
        """The prompt as vLLM takes it."""
        tokens: dict[str, Any] = {"prompt_token_ids": list(self.prompt)}
        return tokens if self.media is None else {**tokens, "multi_modal_data": dict(self.media)}


class Chunk(NamedTuple):
    """A request's part in an iteration."""

    tokens: int
    left: bool


class Answer(NamedTuple):
    """A request's answer: its tokens, its text, the reason of its end."""

    tokens: tuple[int, ...]
    text: str
    reason: str | None
    logprobs: Sequence[Mapping[int, float]]  # of each token
    prompt_logprobs: Sequence[Mapping[int, float]]  # of each token but the first
    scores: Sequence[
        Sequence[float]
    ] = ()  # logprobs of tokens that the request names, for places of its prompt


def asked_for(ask: Ask) -> tuple[object, ...]:
    """All of a request that decides its answer."""
    return (*ask.prompt, pickle.dumps(ask.params), ask.offline, ask.adapter, pickle.dumps(ask.media))


class PreemptedEngine:
    """An engine and the orders that its worker gets."""

    def __init__(
        self, model: Path, *, section: Mapping[str, Any] | None = None, worker: str = WORKER, **flags: Any
    ) -> None:
        chosen = {
            "max_model_len": 1024,
            "max_num_batched_tokens": CHUNK,
            "max_num_seqs": 16,
            "block_size": BLOCK,
            "kv_cache_memory_bytes": 16 << 20,
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "dtype": "float32",
            # With whitespace allowed, a random model writes nothing else.
            "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        }
        ours = section_of(**{"safepoint_every": 1, **(section or {})})
        self.llm = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model),
                scheduling_policy="priority",
                scheduler_cls=SCHEDULER,
                worker_cls=worker,
                additional_config=entries(ours, known_times()),
                **{**chosen, **flags},
            )
        )
        self.core = self.llm.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.preemptions = self.scheduler.arrival_monitor
        self.worker = self.core.model_executor.driver_worker.worker
        self.orders = Scripted()
        if isinstance(self.worker, OurWorker) and self.worker._safepoints is not None:
            self.real_orders = self.worker._safepoints._orders
            self.worker._safepoints._orders = self.orders
        self.answers: dict[str, Answer] = {}
        self._undisturbed: dict[tuple[object, ...], Answer] = {}  # answers by what was asked
        self.steps = 0
        self.lost = 0  # times that a request lost its memory
        self.chunks: dict[str, list[Chunk]] = {}  # of the requests that a test puts here
        self._watch()

    @property
    def layers(self) -> int:
        """Safepoints in an iteration."""
        return int(self.worker._safepoints.layers)

    def add(self, *asked: Ask) -> None:
        """Let requests arrive."""
        for ask in asked:
            self.llm.add_request(
                ask.name,
                ask.question,
                ask.params.clone(),
                lora_request=ask.adapter,
                priority=OFFLINE_PRIORITY if ask.offline else 0,
            )

    def prepared(self, ask: Ask) -> tuple[Any, Any]:
        """A request as far as vLLM's I/O thread brings it; to be called in another thread."""
        request = self.llm.input_processor.process_inputs(
            ask.name,
            ask.question,
            ask.params.clone(),
            ("generate",),
            priority=OFFLINE_PRIORITY if ask.offline else 0,
        )
        self.llm.input_processor.assign_request_id(request)
        return request, self.core.preprocess_add_request(request)[0]

    def add_prepared(self, request: tuple[Any, Any]) -> None:
        """Add a prepared request, as the main thread does."""
        brought, prepared = request
        self.llm.output_processor.add_request(brought, None, None, 0)
        self.core.add_request(prepared)

    def _watch(self) -> None:
        update, preempt = self.scheduler.update_from_output, self.scheduler._preempt_request

        def preempting(*args: Any, **rest: Any) -> None:
            self.lost += 1
            preempt(*args, **rest)

        def watched(output: Any, result: Any) -> Any:
            outcome = outcome_of(result)
            left = outcome.left if outcome is not None else frozenset()
            for long, tokens in output.num_scheduled_tokens.items():
                name = long.rpartition("-")[0]
                if name in self.chunks:
                    self.chunks[name].append(Chunk(tokens, long in left))
            return update(output, result)

        self.scheduler.update_from_output = watched
        self.scheduler._preempt_request = preempting

    @contextmanager
    def counting_tokens(self) -> Iterator[list[int]]:
        """Tokens that go through each layer's attention meanwhile, compiled or not."""
        context = self.worker.vllm_config.compilation_config.static_forward_context
        attends = [layer.impl for layer in context.values() if hasattr(layer, "impl")]
        computed = [0] * len(attends)

        def counting(index: int, attend: Callable[..., Any]) -> Callable[..., Any]:
            def counted(layer: Any, query: torch.Tensor, *args: Any, **rest: Any) -> Any:
                computed[index] += len(query)
                return attend(layer, query, *args, **rest)

            return counted

        with ExitStack() as patches:
            for index, attend in enumerate(attends):
                forward = counting(index, attend.forward)
                patches.enter_context(mock.patch.object(attend, "forward", forward))
            yield computed

    def step(self) -> None:
        """One iteration."""
        self.steps += 1
        for output in self.llm.step():
            if output.finished:
                (one,) = output.outputs
                self.answers[output.request_id] = Answer(
                    tuple(one.token_ids),
                    one.text,
                    one.finish_reason,
                    [values(position) for position in one.logprobs or ()],
                    [values(position) for position in (output.prompt_logprobs or ())[1:]],
                    []
                    if (scores := getattr(output, "prompt_token_id_logprobs", None)) is None
                    else scores.tolist(),
                )

    @property
    def busy(self) -> bool:
        """True if a step is needed, be it for the worker to forget finished requests."""
        return bool(
            self.llm.has_unfinished_requests() or self.scheduler.has_requests() or self.core.batch_queue
        )

    def drain(self, within_s: float = 240.0) -> dict[str, Answer]:
        """Step until all requests are done; return their answers, and forget these."""
        end = time.monotonic() + within_s  # not steps, which cost nothing while a grammar is compiled
        while self.busy and time.monotonic() < end:
            self.step()
        assert not self.busy
        answers, self.answers = self.answers, {}
        return answers

    def drain_losing(
        self, dice: random.Random, often: float, arriving: Mapping[int, Sequence[Ask]] | None = None
    ) -> dict[str, Answer]:
        """Step until all requests are done, and now and then take the memory of a row; returns their answers.

        `arriving` are requests by the step before which they come.
        """
        for step in range(MOST_STEPS):
            if not self.busy:
                break
            self.add(*(arriving or {}).get(step, ()))
            self.step()
            if dice.random() < often:
                self.lose_memory(dice)
                self.overwrite_free()
        answers, self.answers = self.answers, {}
        return answers

    def undisturbed(self, asked: Sequence[Ask]) -> dict[str, Answer]:
        """Each as on its own, with nothing cached; an engine computes an answer once.

        New ones are computed all at once, in a fraction of the iterations, and one of them on its own, which must
        not differ. Each is computed on its own where KV is copied, or requests take each other's memory.
        """
        self.orders.follow(None)
        of = {ask.name: asked_for(ask) for ask in asked}
        new = {of[ask.name]: ask for ask in asked if of[ask.name] not in self._undisturbed}
        apart = len(new) < 2 or self.scheduler.connector is not None
        at_once = None if apart else self._apart(*new.values())
        own = random.Random(len(self._undisturbed)).choice([*new]) if new else None
        for what, ask in new.items():
            if at_once is None or what is own:
                alone = self._apart(ask)
                assert alone is not None
                self._undisturbed[what] = alone[ask.name]
                assert at_once is None or at_once[ask.name] == alone[ask.name], (
                    "together it has another answer"
                )
            else:
                self._undisturbed[what] = at_once[ask.name]
        self.forget()
        return {name: self._undisturbed[what] for name, what in of.items()}

    def _apart(self, *asked: Ask) -> dict[str, Answer] | None:
        """Answers to these with nothing else in the engine; None if any of several lost its memory."""
        self.forget()
        lost = self.lost
        self.add(*asked)
        answers = self.drain()
        return answers if self.lost == lost or len(asked) == 1 else None

    def together(self, asked: Sequence[Ask]) -> dict[str, Answer]:
        """All at once, the online ones an iteration ahead."""
        self.add(*(ask for ask in asked if not ask.offline))
        if self.busy:
            self.step()
        self.add(*(ask for ask in asked if ask.offline))
        return self.drain()

    def disturbed(self, asked: Sequence[Ask], decide: Decide) -> dict[str, Answer]:
        """All at once, with these orders; nothing is left of them."""
        self.orders.follow(decide)
        answers = self.together(asked)
        self.orders.follow(None)
        self.assert_nothing_is_left()
        self.forget()
        return answers

    def scripted(self, asked: Sequence[Ask], orders: Mapping[int, Sequence[Order]]) -> dict[str, Answer]:
        """The same with orders by iteration."""
        return self.disturbed(asked, self.orders.script(orders))

    def forget(self) -> None:
        """Empty the prefix cache; and nothing that is read before it is written is right by chance."""
        for layer in self.kv_tensors:
            layer.fill_(NOISE)
        if self.scheduler.kv_cache_manager.enable_caching:
            assert self.llm.reset_prefix_cache()
        if self.scheduler.connector is not None:
            assert self.scheduler.reset_connector_cache()

    def internal(self, name: str) -> str:
        """vLLM's own name of a request."""
        return next(str(long) for long in self.scheduler.requests if long.rpartition("-")[0] == name)

    def abort(self, name: str) -> None:
        """Abort a request as a client does: the core finds it once the iteration under way has been computed."""
        inside = self.internal(name)
        self.llm.output_processor.abort_requests([inside], internal=True)
        self.core.aborts_queue.put_nowait([inside])

    def lose_memory(self, dice: random.Random) -> None:
        """Some offline request loses its KV blocks, as to a plan that wants them for others."""
        scheduler = self.scheduler
        rows = [request for request in scheduler.running if request.priority]
        if rows:
            victim = dice.choice(rows)
            scheduler.running.remove(victim)
            scheduler._preempt_request(victim, time.monotonic())

    def take_memory(self, name: str) -> None:
        """A row loses its KV blocks, and another request writes into them at once."""
        victim = self.scheduler.requests[self.internal(name)]
        self.scheduler.running.remove(victim)
        self.scheduler._preempt_request(victim, time.monotonic())
        self.overwrite_free()

    def overwrite_free(self) -> None:
        """Fill all free blocks with other contents, and forget these."""
        pool = self.scheduler.kv_cache_manager.block_pool
        free = [block.block_id for block in pool.blocks if not block.ref_cnt and not block.is_null]
        pool.evict_blocks(set(free))
        for block in free:
            for part in self.bytes_of(block):
                part.fill_(NOISE)

    @property
    def kv_tensors(self) -> list[torch.Tensor]:
        """KV of all layers; a state-space layer has several tensors."""
        caches = self.worker.model_runner.kv_caches
        return [part for layer in caches for part in (layer if isinstance(layer, list | tuple) else [layer])]

    def bytes_of(self, block: int) -> list[torch.Tensor]:
        """A KV block's part of every layer, as it lies there."""
        pool = self.scheduler.kv_cache_manager.block_pool
        found = []
        for cache in self.kv_tensors:
            dimension = next(n for n, size in enumerate(cache.shape) if size == pool.num_gpu_blocks)
            found.append(cache.movedim(dimension, 0)[block])
        return found

    def blocks_of(self, name: str) -> list[int]:
        """A row's KV blocks."""
        (ids,) = self.scheduler.kv_cache_manager.get_block_ids(self.internal(name))
        return list(ids)

    def assert_nothing_is_left(self) -> None:
        """Check that no request is left and all memory is free."""
        scheduler, preemptions, runner = self.scheduler, self.preemptions, self.worker.model_runner
        for waiting in (scheduler.requests, scheduler.running, scheduler.waiting):
            assert not waiting
        notes = {
            "scheduler": [
                scheduler.offline,
                scheduler.offline_tokens._had,
                scheduler._inflight_prefills,
            ],
            "preemptions": [part for part in vars(preemptions).values() if isinstance(part, dict)],
            "runner": requests_in(runner),
            "rows": [rows._suspended] if (rows := getattr(self.worker, "_rows", None)) is not None else [],
        }
        if (checkpoints := scheduler.checkpoints) is not None:
            parts = [part for part in vars(checkpoints).values() if isinstance(part, dict | list | set)]
            notes["checkpoints"] = [*parts, *vars(checkpoints._restores).values(), checkpoints.saved._rows]
        left = {name: [dict.fromkeys(part) for part in parts if part] for name, parts in notes.items()}
        for part in (part for parts in notes.values() for part in parts):
            part.clear()  # one test fails for what it left, and not all that follow
        assert not any(left.values()), left
        assert not preemptions._in_flight
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is vLLM's own
        if checkpoints is not None:
            assert checkpoints.memory.room == checkpoints.memory.capacity

    def close(self) -> None:
        """End the engine, so that another can start in this process."""
        self.llm.engine_core.shutdown()
        for name in list(vars(self)):
            delattr(self, name)
        clean_up()


def clean_up() -> None:
    """Free what an engine of this process leaves that was shut down and that nothing refers to."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    gc.collect()


@contextmanager
def compiled_in_pieces(cache: Path, backend: str = "eager") -> Iterator[None]:
    """Engines that start meanwhile compile their pieces by this backend, and keep them in this folder."""
    # What is not compiled is not kept. Asked to keep it, vLLM names its configuration anew in each pass, for 10 ms.
    kept = {"VLLM_CACHE_ROOT": str(cache), "VLLM_USE_AOT_COMPILE": str(int(backend != "eager"))}
    with mock.patch.object(cpu_pieces, "BACKEND", backend), mock.patch.dict(ENVIRONMENT, kept):
        yield


@contextmanager
def registering_once() -> Iterator[None]:
    """Engines that start meanwhile do not look through all modules for kernels that an earlier one replaced."""
    if importlib.util.find_spec("vllm.triton_utils.dispatcher") is None:  # in older versions
        yield
        return
    from vllm.triton_utils import dispatcher

    register = dispatcher.register_kernels

    def registering(overrides: Mapping[str, Any]) -> None:
        holders = {name: dispatcher._resolve_kernel(name) for name in overrides}
        done = {
            name for name, held in holders.items() if isinstance(getattr(*held), dispatcher.KernelOverride)
        }
        if new := {name: kernel for name, kernel in overrides.items() if name not in done}:
            register(new)

    with mock.patch.object(dispatcher, "register_kernels", registering):
        yield


@contextmanager
def started(model: Path, **flags: Any) -> Iterator[PreemptedEngine]:
    """An engine that leaves nothing behind in this process."""
    # vLLM compiles this one function even where nothing else is compiled, for longer than the tests take.
    counting = "batched_count_greater_than"
    as_written = mock.patch.object(sampler, counting, inspect.unwrap(getattr(sampler, counting)))
    with room_for_an_engine() as frozen:
        with frozen(), registering_once():
            engine = PreemptedEngine(model, **flags)
        try:
            with as_written:
                yield engine
        finally:
            with frozen():
                engine.close()


@contextmanager
def room_for_an_engine() -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """The environment of an engine in this process, restored behind it; yields what shortens its start and end."""
    environment, set_num_threads, threads = dict(os.environ), torch.set_num_threads, torch.get_num_threads()
    # Each of the collections at a start and an end takes half a second with all that is imported.
    gc.freeze()
    set_num_threads(1)  # so small a model is slower on several, much slower where others compute too
    os.environ.update(ENVIRONMENT)
    packing = mock.patch.object(
        _custom_ops, "create_onednn_mm", packed_for(compute_threads(), set_num_threads)
    )
    try:
        with packing:
            yield lambda: mock.patch.multiple(gc, freeze=mock.DEFAULT, unfreeze=mock.DEFAULT)
    finally:
        ensure_kv_transfer_shutdown()  # of a start that failed: the next engine would take its connector
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads = set_num_threads  # the worker puts its own there
        set_num_threads(threads)


def packed_for(threads: int, set_num_threads: Callable[[int], None]) -> Callable[..., Any]:
    """vLLM's function that packs weights for oneDNN, which lays them out for so many threads.

    vLLM keeps a process's oneDNN products by shape alone. A product kept for weights in one layout computes
    nonsense from weights in another, so a process needs one layout: the number format was measured with this one.
    """
    pack = _custom_ops.create_onednn_mm

    def packing(*args: Any) -> Any:
        with mock.patch.object(torch, "set_num_threads", set_num_threads), computing_on(threads):
            return pack(*args)

    return packing


def requests_in(runner: Any) -> list[dict[str, Any]]:
    """State that vLLM's model runner, V1 or V2, keeps by a request's name."""
    if hasattr(runner, "req_states"):
        asked = runner.prompt_logprobs_worker
        return [
            runner.req_states.req_id_to_index,
            asked.in_progress_prompt_logprobs,
            getattr(asked, "token_id_scores", {}),
        ]
    return [runner.requests, runner.input_batch.req_id_to_index, runner.num_prompt_logprobs]


def values(position: Any) -> dict[int, float]:
    """Logprobs by token."""
    return {token: one.logprob for token, one in position.items()}


def prompt(tokens: int, seed: int, prefix: Sequence[int] = ()) -> list[int]:
    """Random tokens after a prefix."""
    dice = random.Random(seed)
    return [*prefix, *(dice.randrange(FIRST, LAST) for _ in range(tokens))]


def greedy(tokens: int, **params: Any) -> SamplingParams:
    """Parameters for so many tokens, always the likeliest."""
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, **params)
