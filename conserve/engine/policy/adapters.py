"""LoRA adapters of the requests that run: vLLM computes so many at once, and rows give theirs up for live requests.

Rows that keep an adapter while none of their tokens is computed do not count for vLLM when it admits a request, and
end it when they are computed beside that request. So a request with one adapter too many never runs: for a live one
the rows of another adapter are evicted, and rows wait.
"""

from collections import Counter
from collections.abc import Sequence

from conserve.engine.policy.view import Candidate, View


class Adapters:
    """The adapters of running requests while an iteration is planned."""

    def __init__(self, view: View) -> None:
        self._of = view.adapters
        self._most = view.most_adapters
        live = [self._of[one.name] for one in view.online if one.name in self._of] if self._of else []
        rows = [self._of[one.name] for one in view.offline if one.name in self._of] if self._of else []
        self._running = Counter([*live, *rows, *view.resting_adapters])
        self._live = {*live}

    def fits(self, name: str) -> bool:
        """True if the request may run beside those that do."""
        adapter = self._of.get(name)
        if self._most is None or adapter is None or self._running[adapter]:
            return True
        return len(+self._running) < self._most

    def of_rows_alone(self, name: str) -> bool:
        """True if the request has an adapter, and no live request runs with it."""
        adapter = self._of.get(name)
        return adapter is not None and adapter not in self._live

    def enter(self, name: str) -> None:
        """Count a request that is to run."""
        if (adapter := self._of.get(name)) is not None:
            self._running[adapter] += 1

    def leave(self, name: str) -> None:
        """Take an evicted request out again."""
        if (adapter := self._of.get(name)) is not None:
            self._running[adapter] -= 1

    def in_the_way(self, victims: Sequence[Candidate]) -> list[Candidate]:
        """The fewest of these rows with whom an adapter goes; none if live requests use all of them."""
        rows: dict[int, list[Candidate]] = {}
        for victim in victims:
            if (adapter := self._of.get(victim.name)) is not None:
                rows.setdefault(adapter, []).append(victim)
        whole = [those for adapter, those in rows.items() if len(those) == self._running[adapter]]
        return min(whole, key=len, default=[])
