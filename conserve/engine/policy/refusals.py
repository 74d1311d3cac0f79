"""Refusals of what a class of the user's says: counted, and each kind told once."""

from collections.abc import Callable, Hashable
from typing import Any

from conserve.engine.policy.own_class import pass_interrupt, told

KIND = slice(2)  # the words of a fault that are the same for all requests
KINDS = 20  # of exceptions and faults that are told


class Refusals:
    """Counts refusals, and tells the first one of each kind to `say`."""

    def __init__(self, sentence: str, say: Callable[[str], None]) -> None:
        """`sentence` tells a refusal, with `{fault}` in it."""
        self.count = 0
        self._sentence, self._say = sentence, say
        self._told: dict[Hashable, str] = {}

    @property
    def reasons(self) -> list[str]:
        """The first reason of each kind."""
        return [*self._told.values()]

    def fault(self, fault: str) -> None:
        """Count a refusal for a fault."""
        self._tell(tuple(fault.split()[KIND]), fault)

    def failure(self, error: BaseException) -> None:
        """Count a refusal for an exception; Ctrl-C is raised again."""
        pass_interrupt(error)
        self._tell(type(error).__name__, f"it failed with {told(error)}")

    def _tell(self, kind: Hashable, fault: str) -> None:
        self.count += 1
        if kind not in self._told and len(self._told) < KINDS:
            self._told[kind] = fault
            self._say(self._sentence.format(fault=fault))


def refusals_of(policy: object) -> dict[str, Any]:
    """Number of refusals of a user's policy, and the first reason of each kind, for JSON; none of another's."""
    refused = getattr(policy, "refused", None)
    if isinstance(refused, Refusals):
        return {"count": refused.count, "reasons": refused.reasons}
    return {"count": 0, "reasons": []}
