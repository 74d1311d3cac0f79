"""A policy of the user's own, whose plans are checked before the engine follows them."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from conserve.engine.policy.faults import fault_of
from conserve.engine.policy.plan import Plan, Policy
from conserve.engine.policy.view import View

KIND = slice(2)  # the words of a fault that are the same for all requests
KINDS = 20  # of exceptions and faults that are told


class Own:
    """Follows a user's policy, and the policy `instead` in each iteration for which the user's plan is refused.

    `own` has the method `plan(view) -> Plan | None`, and may have the three flags of `Policy`. `say` gets a
    sentence for each new kind of refusal.
    """

    def __init__(self, name: str, own: Any, instead: Policy, say: Callable[[str], None]) -> None:
        self._name, self._own, self._instead, self._say = name, own, instead, say
        self.decides = bool(getattr(own, "decides", True))
        self.holds_offline = bool(getattr(own, "holds_offline", False))
        self.spares_offline = bool(getattr(own, "spares_offline", False))
        self.refused = 0
        self._told: dict[str, str] = {}

    @property
    def reasons(self) -> list[str]:
        """The first reason of each kind for which a plan was refused."""
        return [*self._told.values()]

    def plan(self, view: View) -> Plan | None:
        """The user's plan if the engine can do what it says, else the other policy's."""
        try:
            plan: Plan | None = self._own.plan(view)
            fault = None if plan is None else fault_of(plan, view)
        except Exception as error:
            kind = type(error).__name__
            self._refuse(kind, f"it failed with {kind}: {error}")
            return self._instead.plan(view)
        if fault is None:
            return plan
        self._refuse(" ".join(fault.split()[KIND]), fault)
        return self._instead.plan(view)

    def _refuse(self, kind: str, fault: str) -> None:
        self.refused += 1
        if kind in self._told or len(self._told) == KINDS:
            return
        self._told[kind] = fault
        self._say(
            f"a plan of {self._name} is refused ({fault}); {type(self._instead).__name__} plans instead"
        )


def own_policy(path: str) -> Any:
    """Make the policy with this class path; raises ValueError with the reason if that cannot be."""
    module, _, cls = path.rpartition(".")
    try:
        policy = getattr(import_module(module), cls)()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"the policy {path} cannot be made ({why}); install its module, or name its folder in PYTHONPATH"
        ) from error
    if not callable(getattr(policy, "plan", None)):
        raise ValueError(f"the policy {path} has no method plan(view)")
    return policy
