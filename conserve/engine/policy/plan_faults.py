"""Faults of a plan: what the engine could not do, or what would harm it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite

from conserve.engine.policy.kv_groups import blocks_lacking
from conserve.engine.policy.plan import Plan
from conserve.engine.policy.view import Candidate, View
from conserve.profiles.batch import Batch, Slice


def fault_of(plan: object, view: View) -> str | None:
    """The first fault of a plan, for the middle of a sentence; None if the engine can follow it."""
    if not isinstance(plan, Plan):
        return f"it is no Plan but of type {type(plan).__name__}"
    return next(_faults(plan, view), None)


def _faults(plan: Plan, view: View) -> Iterator[str]:
    lists: tuple[object, ...] = (plan.admitted, plan.restored, plan.evicted, plan.parked)
    if not all(isinstance(names, Sequence) for names in lists):
        yield "its lists of requests can be read once only"
    limit_ms: object = plan.limit_ms
    if limit_ms is not None and not isinstance(limit_ms, int | float):
        yield f"its limit_ms is {limit_ms!r}"
    pushed: object = plan.pushed
    if not isinstance(pushed, Mapping) or any(
        not isinstance(tokens, int) or tokens > plan.tokens.get(name, 0) for name, tokens in pushed.items()
    ):
        yield "it pushes what it does not compute"
    running = {request.name: request for request in (*view.online, *view.offline)}
    waiting = _waiting(view, {*plan.admitted, *plan.restored})
    yield from _faulty_names(plan, view, running, waiting)
    yield from _faulty_tokens(plan, running | waiting)
    yield from _faulty_room(plan, view, running | waiting)
    if plan.batch != _batch(plan.tokens, running | waiting):
        yield "its batch does not say what its tokens say"
    if not isfinite(plan.predicted_ms) or plan.predicted_ms < 0:
        yield f"it predicts {plan.predicted_ms} ms"
    if not isfinite(plan.online_ms) or plan.online_ms < 0:
        yield f"it predicts {plan.online_ms} ms for live requests"
    if view.online and not plan.tokens:
        yield "it computes nothing while live requests run"


def _waiting(view: View, names: set[str]) -> dict[str, Candidate]:
    """The waiting requests with these names; the queues are read as far as needed."""
    found: dict[str, Candidate] = {}
    for queue in (view.waiting_online, view.waiting_offline):
        for request in queue if len(found) < len(names) else ():
            if request.name in names:
                found[request.name] = request
                if len(found) == len(names):
                    break
    return found


def _faulty_names(
    plan: Plan, view: View, running: Mapping[str, Candidate], waiting: Mapping[str, Candidate]
) -> Iterator[str]:
    evictable = {request.name for request in (*view.offline, *view.waiting_with_blocks)}
    places = [*plan.evicted, *plan.parked, *plan.restored, *plan.tokens]
    if twice := _twice(places) or _twice(plan.admitted):
        yield f"it names {twice} twice"
    for name in plan.evicted:
        if name not in evictable:
            yield f"it evicts {name}, which is no offline request with KV blocks"
    rows = {request.name for request in view.offline}
    if plan.parked and not view.parks:
        yield "rows cannot be parked on this engine"
    for name in plan.parked:
        if name not in rows:
            yield f"it parks {name}, which is no offline request that runs"
    for name in (*plan.admitted, *plan.restored):
        if name not in waiting:
            yield f"it starts {name}, which does not wait"
    for name in plan.admitted:
        if name not in plan.tokens:
            yield f"it admits {name} without tokens"
    for name in plan.tokens:
        if name not in running and name not in plan.admitted:
            yield f"it computes {name}, which does not run and is not admitted"
    for name in plan.restored:
        if not waiting[name].restorable:
            yield f"it restores {name}, of which host memory has nothing"


def _faulty_tokens(plan: Plan, requests: Mapping[str, Candidate]) -> Iterator[str]:
    for name, tokens in plan.tokens.items():
        most = requests[name].tokens
        if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= most:
            yield f"it gives {name} {tokens!r} tokens, and 1 to {most} can be computed"


def _faulty_room(plan: Plan, view: View, requests: Mapping[str, Candidate]) -> Iterator[str]:
    offline = {request.name: request for request in view.offline}
    started = len(plan.admitted) + len(plan.restored)
    freed = len(plan.parked) + sum(name in offline for name in plan.evicted)
    if not started and offline.keys().isdisjoint(plan.tokens):
        return  # vLLM cuts down, and evicts for, live requests that run already
    total = sum(plan.tokens.values()) + bool(plan.restored)  # vLLM starts no restore in a full iteration
    if total > view.max_tokens:
        yield f"it has {total} tokens, and an iteration takes {view.max_tokens}"
    if started > view.free_slots + freed:
        yield f"it starts {started} requests, and {view.free_slots + freed} slots are free"
    held = offline | {request.name: request for request in view.waiting_with_blocks}
    blocks = view.free_blocks + sum(held[name].blocks for name in plan.evicted)
    taken = sum(_blocks(requests[name], plan, view) for name in (*plan.tokens, *plan.restored))
    if taken > blocks:
        yield f"it takes {taken} KV blocks, and {blocks} are free"
    adapters = _adapters(plan, view)
    if plan.admitted and view.most_adapters is not None and adapters > view.most_adapters:
        yield f"it runs {adapters} LoRA adapters at once, and {view.most_adapters} can"


def _adapters(plan: Plan, view: View) -> int:
    """LoRA adapters of the requests that run under the plan, those without tokens too: each has a turn to come."""
    running = {request.name for request in (*view.online, *view.offline)}
    running = running.difference(plan.evicted, plan.parked).union(plan.admitted)
    return len({view.adapters[name] for name in running if name in view.adapters} | {*view.resting_adapters})


def _blocks(request: Candidate, plan: Plan, view: View) -> int:
    """KV blocks that the request takes: for its whole prompt if it starts, else for its tokens."""
    starts = request.name in plan.admitted or request.name in plan.restored
    tokens = request.tokens if starts else plan.tokens[request.name]
    return blocks_lacking(request, tokens, view.kv_groups, view.block_tokens)


def _batch(tokens: Mapping[str, int], requests: Mapping[str, Candidate]) -> Batch:
    return Batch.of(Slice(n, requests[name].context, requests[name].decode) for name, n in tokens.items())


def _twice(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]
