"""vLLM's waiting queue as two lanes: ten thousand offline requests cost an iteration no time."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import chain

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from conserve.engine.vllm.lane import is_online


class Lanes(RequestQueue):  # type: ignore[misc]
    """Implements vLLM's `RequestQueue` by priority, then arrival. Both lanes are sorted, the next request first."""

    def __init__(self) -> None:
        self.online: list[Request] = []
        self.offline: list[Request] = []

    def _lane(self, request: Request) -> list[Request]:
        return self.online if is_online(request) else self.offline

    def add_request(self, request: Request) -> None:
        """Insert the request in its place."""
        insort(self._lane(request), request)

    def prepend_request(self, request: Request) -> None:
        """Insert an evicted request in its place: it arrived before the others, so it comes before them."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Insert requests in their places."""
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Request:
        """Return the next request; it stays."""
        return (self.online or self.offline)[0]

    def pop_request(self) -> Request:
        """Remove the next request and return it."""
        return (self.online or self.offline).pop(0)

    def take(self, requests: Iterable[Request]) -> None:
        """Remove waiting requests, most of which are near the front; raises ValueError as `remove_request` does."""
        for request in requests:
            self.remove_request(request)

    def remove_request(self, request: Request) -> None:
        """Remove the request; raises ValueError if it is not waiting."""
        lane = self._lane(request)
        place = bisect_left(lane, request)
        if place == len(lane) or lane[place] is not request:
            raise ValueError(f"{request.request_id} is not waiting")
        del lane[place]

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove the requests that are waiting; ignore the others."""
        gone = set(requests)
        self.online = [request for request in self.online if request not in gone]
        self.offline = [request for request in self.offline if request not in gone]

    def __bool__(self) -> bool:
        return bool(self.online or self.offline)

    def __len__(self) -> int:
        return len(self.online) + len(self.offline)

    def __iter__(self) -> Iterator[Request]:
        return chain(self.online, self.offline)
