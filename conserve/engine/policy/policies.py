"""Policies by the names that flags and reports use, and users' own by the path of their class."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from conserve.engine.policy.conserve import Conserve
from conserve.engine.policy.hygen import hygen, hygen_star, sarathi_plus
from conserve.engine.policy.non_preemptive import NonPreemptive
from conserve.engine.policy.online_only import OnlineOnly
from conserve.engine.policy.own import CheckedPolicy, own_policy
from conserve.engine.policy.paced import Paced
from conserve.engine.policy.plan import Policy, Traits
from conserve.engine.policy.priority import Priority
from conserve.names import (
    CONSERVE,
    HYGEN,
    HYGEN_STAR,
    NON_PREEMPTIVE,
    ONLINE_ONLY,
    PACED,
    PRIORITY,
    SARATHI_PP,
)

if TYPE_CHECKING:
    from conserve.server_report import SloReport

POLICIES: dict[str, Callable[[], Policy]] = {
    CONSERVE: Conserve,
    ONLINE_ONLY: OnlineOnly,
    NON_PREEMPTIVE: NonPreemptive,
    PRIORITY: Priority,
    PACED: Paced,
    SARATHI_PP: sarathi_plus,
    HYGEN_STAR: hygen_star,
    HYGEN: hygen,
}
SERVING = (CONSERVE, ONLINE_ONLY, NON_PREEMPTIVE, PRIORITY)  # policies for live traffic
COMPARED = (SARATHI_PP, HYGEN_STAR, HYGEN)  # policies to compare with, which only `conserve bench` sets
BENCHED = (*SERVING, *COMPARED)


def named(name: str, say: Callable[[str], None] = lambda sentence: None) -> Policy:
    """Make the policy of this name, or a user's own from its class path (`package.module.Class`).

    `say` gets the sentences about refused plans of a user's own. Raises ValueError if there is no such policy.
    """
    if name in POLICIES:
        return POLICIES[name]()
    if "." not in name:
        raise ValueError(
            f"there is no policy {name!r}; there are {', '.join(SERVING)}, or give package.module.Class"
        )
    return CheckedPolicy(name, own_policy(name), Conserve(), say)


def traits(name: str) -> Traits:
    """Traits of the policy of this name; of a user's own, whose module may be elsewhere, the usual ones."""
    return POLICIES[name]().traits if name in POLICIES else Traits(rows_may_leave="." in name)


def kept_promises(slo: "SloReport", policy: str) -> "SloReport":
    """Promises that a report tells, without a harm that the policy does not keep."""
    return slo if traits(policy).knows_slo else slo.without_harm()
