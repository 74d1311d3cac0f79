"""A policy of the user's own, whose plans are checked before the engine follows them."""

from collections.abc import Callable
from typing import Any

from conserve.engine.policy.own_class import made
from conserve.engine.policy.own_waits import Waits, serves
from conserve.engine.policy.plan import Plan, Policy, Traits
from conserve.engine.policy.plan_faults import fault_of
from conserve.engine.policy.refusals import Refusals
from conserve.engine.policy.view import View

FLAGS = Traits._fields[:4]  # attributes of a user's policy


class CheckedPolicy:
    """Follows a user's policy, and the policy `instead` in each iteration for which the user's plan is refused.

    A plan is also refused if it leaves out a live request that has waited for too long, and that `instead` serves.
    `own` has the method `plan(view) -> Plan | None`, and may have the flags `FLAGS`. `say` gets a sentence for
    each new kind of refusal.
    """

    def __init__(self, name: str, own: Any, instead: Policy, say: Callable[[str], None]) -> None:
        self._own, self._instead = own, instead
        self.traits = traits_of(own)
        sentence = f"a plan of {name} is refused ({{fault}}); {type(instead).__name__} plans instead"
        self.refused = Refusals(sentence, say)
        self._waits = Waits()

    def plan(self, view: View) -> Plan | None:
        """The user's plan if the engine can do what it says, else the other policy's."""
        plan = self._checked(view)
        self._waits.note(plan, view)
        return plan

    def _checked(self, view: View) -> Plan | None:
        try:
            plan: Plan | None = self._own.plan(view)
            fault = None if plan is None else fault_of(plan, view)
        except BaseException as error:
            self.refused.failure(error)
            return self._instead.plan(view)
        if fault is not None:
            self.refused.fault(fault)
            return self._instead.plan(view)
        if plan is None or not (late := self._waits.too_long(plan, view)):
            return plan
        other = self._instead.plan(view)
        served = next((name for name in late if other is None or serves(other, name)), None)
        if served is None:
            return plan  # not the user's policy holds them up
        self.refused.fault(f"it leaves the live request {served} out for too long")
        return other


def traits_of(own: Any) -> Traits:
    """Traits of a user's policy: its flags, else those inherited from a policy of ConServe, else the usual."""
    inherited = getattr(own, "traits", None)
    usual = inherited if isinstance(inherited, Traits) else Traits()
    flags = {name: bool(getattr(own, name, getattr(usual, name))) for name in FLAGS}
    return Traits(**flags, rows_may_leave=True)


def own_policy(path: str) -> Any:
    """Make the policy with this class path; raises ValueError with the reason if that cannot be."""
    own = made(path, "policy", {"plan": "view"})
    if hasattr(own, "holds_offline"):
        raise ValueError(f"the policy {path} has the flag holds_offline, which is called defers_offline")
    return own
