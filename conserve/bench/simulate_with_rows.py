"""Simulation of live requests beside offline rows, by the engine's latency model. Pure.

`simulate_online.play` with rows in it. It knows nothing of KV memory, of the front end and of the machine's noise,
so it serves to choose a parameter, not to report a result.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from math import inf

from conserve.bench.simulate_online import EngineModel, Request, requests_of
from conserve.bench.traces import Trace
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.model import LinearModel

LEAD_S = 8.0  # time that rows have run for when the first live request may arrive


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Scheduling of live requests beside rows.

    With `online_first` live requests are scheduled before rows, and take their places. Otherwise it is vLLM's
    priority scheduling: running requests keep their place in the iteration, and only the queue is ordered.
    """

    online_first: bool
    max_tokens: int  # of an iteration
    budget_ms: float = inf  # predicted time of an iteration
    predictor: LinearModel | None = None  # that predicts it; the engine's own model by default
    rows_per_s: float = inf  # rows that begin; as many as there is room for by default


@dataclass(slots=True, kw_only=True)
class _State:
    """The engine between two iterations."""

    engine: EngineModel
    sharing: Sharing
    lengths: Iterator[tuple[int, int]]
    window: int  # rows in the engine, waiting ones included
    online: list[Request] = field(default_factory=list)  # running
    rows: list[Request] = field(default_factory=list)  # running
    order: list[Request] = field(default_factory=list)  # both, by admission
    waiting: deque[Request] = field(default_factory=deque)
    waiting_rows: deque[Request] = field(default_factory=deque)
    begun: int = 0  # rows


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWithRows:
    """Simulation of one block."""

    requests: Sequence[Request]
    offline_tokens: int  # within the block
    block_s: float


class _Iteration:
    """The next iteration while it is composed."""

    def __init__(self, state: _State) -> None:
        self._model = state.sharing.predictor or state.engine.model
        self._limit_ms = state.sharing.budget_ms
        self.batch = Batch()
        self.room = state.sharing.max_tokens
        self.scheduled: list[tuple[Request, int]] = []

    def take(self, one: Request, *, whatever: bool = False) -> bool:
        """Add the request as far as tokens and time last; False if not one token of it fits.

        `whatever` adds all of a request of which time has not one token: else all work would stop.
        """
        decode = one.computed >= one.input_tokens
        tokens = one.tokens(self.room)
        if self._limit_ms < inf and tokens:
            wanted = Slice(tokens, one.computed, decode)
            fitting = self._model.can_schedule(self.batch, wanted, self._limit_ms)
            tokens = fitting or (tokens if whatever else 0)
        if not tokens:
            return False
        self.batch.add(tokens, one.computed, decode)
        self.room -= tokens
        self.scheduled.append((one, tokens))
        return True


def play_with_rows(
    trace: Trace | None,
    engine: EngineModel,
    block_s: float,
    sharing: Sharing,
    lengths: Sequence[tuple[int, int]],
    *,
    window: int,
    lead_s: float = LEAD_S,
) -> BlockWithRows:
    """Simulate a block beside rows of these lengths, `window` of which are in the engine at a time."""
    state = _State(engine=engine, sharing=sharing, lengths=cycle(lengths), window=window)
    requests = requests_of(trace)
    due, now_s, offline = deque(requests), -lead_s, 0
    while now_s < block_s or due or state.waiting or state.online:
        while due and due[0].at_s <= now_s:
            state.waiting.append(due.popleft())
        _refill(state, now_s + lead_s)
        iteration = _composed(state)
        if not iteration.scheduled:
            now_s = _next_s(state, due, now_s, lead_s, block_s)
            continue
        now_s += engine.ms(iteration.batch) / 1e3
        rows = set(map(id, state.rows))
        if 0 <= now_s < block_s:
            offline += sum(tokens for one, tokens in iteration.scheduled if id(one) in rows)
        _advance(state, iteration, now_s)
    return BlockWithRows(requests=requests, offline_tokens=offline, block_s=block_s)


def _refill(state: _State, since_s: float) -> None:
    """Bring rows in: as many as the window holds, or as have come at the fixed rate."""
    due = inf if state.sharing.rows_per_s == inf else 1 + int(state.sharing.rows_per_s * since_s)
    while len(state.rows) + len(state.waiting_rows) < state.window and state.begun < due:
        prompt, answer = next(state.lengths)
        state.waiting_rows.append(Request(0.0, prompt, answer))
        state.begun += 1


def _next_s(state: _State, due: deque[Request], now_s: float, lead_s: float, block_s: float) -> float:
    """Next moment at which something comes into an idle engine."""
    rate = state.sharing.rows_per_s
    row_s = state.begun / rate - lead_s if 0 < rate < inf else inf
    return min(due[0].at_s if due else inf, max(min(row_s, block_s), now_s + 1e-6))


def _composed(state: _State) -> _Iteration:
    """The next iteration: running requests, then waiting ones, live before offline."""
    iteration = _Iteration(state)
    if state.sharing.online_first:
        _online_first(state, iteration)
        for row in _decodes_first(state.rows):
            if not iteration.take(row):
                return iteration
    else:
        for one in state.order:
            iteration.take(one)
        _admit(state, iteration, state.waiting, state.online)
        if state.waiting:
            return iteration
    _admit(state, iteration, state.waiting_rows, state.rows)
    return iteration


def _decodes_first(rows: Sequence[Request]) -> list[Request]:
    return sorted(rows, key=lambda one: one.computed < one.input_tokens)


def _online_first(state: _State, iteration: _Iteration) -> None:
    """Phase 1 of HyGen: all decode steps, then prompts as far as time lasts; rows make place."""
    prompts = []
    for one in state.online:
        if one.computed >= one.input_tokens:
            iteration.take(one, whatever=True)
        else:
            prompts.append(one)
    for one in prompts:
        if not iteration.take(one, whatever=not iteration.scheduled):
            return
    while state.waiting and iteration.room:
        if len(state.order) >= state.engine.max_requests and not _evict(state):
            return
        if not iteration.take(state.waiting[0], whatever=not iteration.scheduled):
            return
        _start(state, state.waiting, state.online)


def _evict(state: _State) -> bool:
    """Put the row that was admitted last back into the queue; False without one."""
    if not state.rows:
        return False
    row = state.rows.pop()
    state.order.remove(row)
    row.computed = 0
    state.waiting_rows.appendleft(row)
    return True


def _admit(state: _State, iteration: _Iteration, queue: deque[Request], running: list[Request]) -> None:
    while queue and iteration.room and len(state.order) < state.engine.max_requests:
        if not iteration.take(queue[0]):
            return
        _start(state, queue, running)


def _start(state: _State, queue: deque[Request], running: list[Request]) -> None:
    one = queue.popleft()
    running.append(one)
    state.order.append(one)


def _advance(state: _State, iteration: _Iteration, now_s: float) -> None:
    """Count the iteration's tokens; answers that are complete leave."""
    ended = {id(one) for one, tokens in iteration.scheduled if one.advance(tokens, now_s)}
    if ended:
        state.online = [one for one in state.online if id(one) not in ended]
        state.rows = [one for one in state.rows if id(one) not in ended]
        state.order = [one for one in state.order if id(one) not in ended]
