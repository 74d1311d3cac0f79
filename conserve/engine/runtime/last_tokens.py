"""When live requests got their last tokens. Hundreds may get all of theirs together: these are one entry."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

from conserve.engine.policy.view import DEFAULT_CLASS


class Alike(NamedTuple):
    """Requests of one class whose last tokens came at the same time, in monotonic seconds."""

    last: float
    live_class: str
    requests: int


class LastTokens:
    """Times of last tokens by request, in monotonic seconds."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}  # of those that are together, an earlier one
        self._together: Sequence[str] = ()  # the requests of the last call, if none has come or gone since
        self._together_at = 0.0
        self._classes: Mapping[str, int] = {}  # class -> how many of them there are in it

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, request: str) -> bool:
        return request in self._at

    def begin(self, request: str, at: float) -> None:
        """Note a request's first token."""
        self._part()
        self._at[request] = at

    def end(self, request: str) -> bool:
        """Forget a request; False if it had no token."""
        self._part()
        return self._at.pop(request, None) is not None

    def go_on(self, requests: Sequence[str], class_of: Mapping[str, str], at: float) -> list[Alike]:
        """Note further tokens: when these requests got the ones before. Requests without one are passed over."""
        if requests == self._together:
            alike = [Alike(self._together_at, *counted) for counted in self._classes.items()]
        else:
            self._part()
            known = [request for request in requests if request in self._at]
            classes = [*map(class_of.get, known, repeat(DEFAULT_CLASS))]
            before = Counter(zip(map(self._at.__getitem__, known), classes, strict=True))
            alike = [Alike(*one, count) for one, count in before.items()]
            self._together, self._classes = requests, Counter(classes)
        self._together_at = at
        return alike

    def _part(self) -> None:
        """Give each of the requests that are together a time of its own."""
        at = self._together_at
        self._at.update((request, at) for request in self._together if request in self._at)
        self._together, self._classes = (), {}
