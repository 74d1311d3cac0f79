"""vLLM's waiting queue as two lanes, so that ten thousand offline requests cost an online one nothing."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import chain

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from conserve.engine.vllm.lane import is_online


class Lanes(RequestQueue):  # type: ignore[misc]
    """Implements vLLM's queue: by priority, then arrival. Both lanes are sorted; the first is the next."""

    def __init__(self) -> None:
        self.online: list[Request] = []
        self.offline: list[Request] = []

    def _lane(self, request: Request) -> list[Request]:
        return self.online if is_online(request) else self.offline

    def add_request(self, request: Request) -> None:
        """Put it in its place."""
        insort(self._lane(request), request)

    def prepend_request(self, request: Request) -> None:
        """The same: a preempted request comes before others because it arrived before them."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """The same for many."""
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Request:
        """The next one, which stays."""
        return (self.online or self.offline)[0]

    def pop_request(self) -> Request:
        """The next one, taken out."""
        return (self.online or self.offline).pop(0)

    def take(self, requests: Iterable[Request]) -> None:
        """Take out requests that are here, most of them near the front."""
        for request in requests:
            self.remove_request(request)

    def remove_request(self, request: Request) -> None:
        """Take it out, wherever it stands."""
        lane = self._lane(request)
        place = bisect_left(lane, request)
        if place == len(lane) or lane[place] is not request:
            raise ValueError(f"{request.request_id} is not waiting")
        del lane[place]

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take out those that are here."""
        gone = set(requests)
        self.online = [request for request in self.online if request not in gone]
        self.offline = [request for request in self.offline if request not in gone]

    def __bool__(self) -> bool:
        return bool(self.online or self.offline)

    def __len__(self) -> int:
        return len(self.online) + len(self.offline)

    def __iter__(self) -> Iterator[Request]:
        return chain(self.online, self.offline)
