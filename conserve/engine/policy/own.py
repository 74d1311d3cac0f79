"""A policy of the user's own, whose plans are checked before the engine follows them."""

from collections.abc import Callable
from typing import Any

from conserve.engine.policy.faults import fault_of
from conserve.engine.policy.own_class import made
from conserve.engine.policy.plan import Plan, Policy
from conserve.engine.policy.refusals import Refusals
from conserve.engine.policy.view import View


class Own:
    """Follows a user's policy, and the policy `instead` in each iteration for which the user's plan is refused.

    `own` has the method `plan(view) -> Plan | None`, and may have the three flags of `Policy`. `say` gets a
    sentence for each new kind of refusal.
    """

    def __init__(self, name: str, own: Any, instead: Policy, say: Callable[[str], None]) -> None:
        self._own, self._instead = own, instead
        self.decides = bool(getattr(own, "decides", True))
        self.holds_offline = bool(getattr(own, "holds_offline", False))
        self.spares_offline = bool(getattr(own, "spares_offline", False))
        sentence = f"a plan of {name} is refused ({{fault}}); {type(instead).__name__} plans instead"
        self.refused = Refusals(sentence, say)

    def plan(self, view: View) -> Plan | None:
        """The user's plan if the engine can do what it says, else the other policy's."""
        try:
            plan: Plan | None = self._own.plan(view)
            fault = None if plan is None else fault_of(plan, view)
        except Exception as error:
            self.refused.failure(error)
            return self._instead.plan(view)
        if fault is None:
            return plan
        self.refused.fault(fault)
        return self._instead.plan(view)


def own_policy(path: str) -> Any:
    """Make the policy with this class path; raises ValueError with the reason if that cannot be."""
    return made(path, "policy", {"plan": "view"})
