"""Fairness among classes of live traffic (docs/adr/0023): whose prompt is next, and what it may cost the others.

The cost of the tokens that a class has computed is counted. The next prompt is one of the class with the smallest
count, so a class with much traffic delays another by one prompt's chunk at a time, and not by its queue. Source:
"Fairness in Serving Large Language Models" (OSDI 2024), Algorithm 2, with an iteration's chunk as the unit.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import groupby, takewhile
from math import inf
from typing import TypeVar

from conserve.engine.policy.view import Candidate, View

T = TypeVar("T")


def prompts_in_turn(view: View, has_room: Callable[[], bool]) -> Iterator[tuple[Candidate, bool]]:
    """Prompts in the order in which they are served, with True for those that wait.

    Without classes running prompts come before waiting requests. With classes the class that was served least comes
    first; a running prompt comes before the waiting ones of its class. Once `has_room()` is false none that waits
    comes any more, but every running prompt does: it holds the KV blocks that the others wait for.
    """
    running = [request for request in view.online if not request.decode]
    waiting = takewhile(lambda request: has_room(), view.waiting_online)
    if view.slos:
        yield from _merged(view, running, waiting)
        return
    yield from ((request, False) for request in running)
    yield from ((request, True) for request in waiting)


def _merged(
    view: View, left: list[Candidate], waiting: Iterator[Candidate]
) -> Iterator[tuple[Candidate, bool]]:
    """Prompts of several classes: `left`, which run, and `waiting`, in the order of `fair_order`."""
    served = dict(view.served)

    def count(request: Candidate) -> float:
        return served.get(view.class_of(request), 0.0)

    head = next(waiting, None)
    while left or head is not None:
        first = min(left, key=count, default=None)
        begins = first is None or (head is not None and count(head) < count(first))
        request = head if begins else first
        assert request is not None
        yield request, begins
        name = view.class_of(request)
        served[name] = served.get(name, 0.0) + request.tokens
        if begins:
            head = next(waiting, None)
        else:
            left.remove(request)


def fair_order(
    requests: Iterable[T],
    *,
    class_of: Callable[[T], str],
    cost_of: Callable[[T], float],
    served: Mapping[str, float],
    level_of: Callable[[T], Hashable],
) -> Iterator[T]:
    """Requests by class, the one served least first, and in their own order within a class.

    `requests` are sorted by level (vLLM's priority): no class overtakes a better level. Two classes that both have
    requests left never differ by more than they did before, or than the largest cost of one request.
    """
    counts = dict(served)
    for _, level in groupby(requests, level_of):
        queues: dict[str, deque[T]] = {}
        for request in level:
            queues.setdefault(class_of(request), deque()).append(request)
        while queues:
            name = min(queues, key=lambda one: counts.get(one, 0.0))
            request = queues[name].popleft()
            counts[name] = counts.get(name, 0.0) + cost_of(request)
            if not queues[name]:
                del queues[name]
            yield request


def others_limit_ms(view: View, request: Candidate, decodes: Iterable[Candidate]) -> float:
    """Longest iteration that a late prompt may make of one that requests of other classes decode in, in ms.

    A prompt past its TTFT hurries beside decode steps of its own class, and beside those of a class that was served
    more than its own. The TBT of a class that was served less is kept: its requests did not cause the delay.
    """
    if not view.slos:
        return inf
    mine = view.class_of(request)
    spared = {
        name
        for name in map(view.class_of, decodes)
        if view.served.get(name, 0.0) < view.served.get(mine, 0.0)
    }
    return min((view.slos[name].online_tbt_ms for name in spared), default=inf) - view.online_waited_ms
