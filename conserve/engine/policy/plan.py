"""Plan: the result of a policy. Policy: the protocol that all policies implement."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from conserve.engine.policy.view import View
from conserve.profiles.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One iteration. A running request without tokens is deferred, and keeps its KV blocks."""

    tokens: Mapping[str, int]  # request -> tokens that it computes, at least one
    batch: Batch  # the same, as the latency model sees it
    admitted: Sequence[str] = ()  # requests with tokens that were waiting, in order
    restored: Sequence[str] = ()  # waiting requests whose KV begins to come back; they compute nothing yet
    evicted: Sequence[str] = ()  # offline requests whose KV blocks, and slots if they run, are freed before
    parked: Sequence[str] = ()  # running offline requests whose slots are freed before; KV blocks stay theirs
    predicted_ms: float = 0.0
    online_ms: float = 0.0  # what the online requests among them would take alone
    limit_ms: float | None = None  # time that offline tokens had to fit into; None if there were none
    pushed: Mapping[str, int] = field(default_factory=dict)  # of `tokens`, those beyond the usual limit

    @property
    def total(self) -> int:
        """Tokens of the iteration."""
        return self.batch.tokens

    @property
    def changes_something(self) -> bool:
        """True unless the engine stays as it is: nothing is computed, restored, evicted or parked."""
        return bool(self.tokens or self.restored or self.evicted or self.parked)


class Traits(NamedTuple):
    """Traits of a policy beside its plans. A policy of the user's own may set the first four."""

    decides: bool = True  # False: vLLM's own schedule, and `plan` is not called
    defers_offline: bool = False  # offline requests are always deferred, with a latency model or without
    spares_offline: bool = False  # vLLM evicts the request that was admitted last, rather than an offline one
    repeats: bool = False  # a plan of decode steps alone holds for some iterations while only contexts change
    knows_slo: bool = True  # False: neither an SLO nor a harm changes what is computed
    pauses_rows: bool = False  # rows are held back, or pause, while a promise is not kept
    rows_may_leave: bool = False  # rows leave iterations for live requests
    guards_prefixes: bool = False  # rows leave free KV blocks with prefixes of live requests alone
    treats_alike: bool = False  # plans live requests without rows, too, and no row leaves for them by default
    predicts_as_hygen: bool = False  # plans with HyGen's latency predictor


class Policy(Protocol):
    """Composes iterations."""

    traits: Traits

    def plan(self, view: View) -> Plan | None:
        """Plan the next iteration; None leaves it to vLLM. A policy keeps no state: equal views get equal plans."""
