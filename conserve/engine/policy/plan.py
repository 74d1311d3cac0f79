"""What a policy answers, and what all policies have in common."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from conserve.engine.policy.view import View
from conserve.profiles.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One iteration. Running requests without tokens are held out and keep their KV blocks."""

    tokens: Mapping[str, int]  # request -> tokens it computes, at least one
    batch: Batch  # the same, as the latency model sees it
    admitted: Sequence[str] = ()  # those of them that were waiting, in order
    restored: Sequence[str] = ()  # waiting requests whose KV begins to come back; they compute nothing yet
    preempted: Sequence[str] = ()  # running offline requests that give up slot and KV blocks first
    predicted_ms: float = 0.0
    limit_ms: float | None = None  # what offline tokens had to fit into; None if there were none

    @property
    def total(self) -> int:
        """Tokens of the iteration."""
        return self.batch.tokens


class Policy(Protocol):
    """Composes iterations."""

    decides: bool  # False: vLLM's own schedule, and `plan` is not asked
    holds_offline: bool  # offline requests never run, with a latency model or without
    spares_offline: bool  # vLLM takes memory back from who was admitted last, not from offline requests

    def plan(self, view: View) -> Plan | None:
        """The next iteration; None leaves it to vLLM."""
