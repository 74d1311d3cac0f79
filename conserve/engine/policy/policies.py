"""Policies by the names that flags and reports use."""

from collections.abc import Callable

from conserve.engine.policy.conserve import Conserve
from conserve.engine.policy.non_preemptive import NonPreemptive
from conserve.engine.policy.online_only import OnlineOnly
from conserve.engine.policy.paced import Paced
from conserve.engine.policy.plan import Policy
from conserve.engine.policy.priority import Priority

CONSERVE = "conserve"
POLICIES: dict[str, Callable[[], Policy]] = {
    CONSERVE: Conserve,
    "online-only": OnlineOnly,
    "non-preemptive": NonPreemptive,
    "priority": Priority,
    "paced": Paced,
}
SERVING = (CONSERVE, "online-only", "non-preemptive", "priority")  # policies for live traffic
