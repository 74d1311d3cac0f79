"""What the scheduler and the workers tell each other about an iteration that can be preempted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NAME = "conserve"  # of the attribute on vLLM's SchedulerOutput and ModelRunnerOutput; both are pickled whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """On a `SchedulerOutput`: safepoints are on for this iteration."""

    iteration: int
    flag: str  # name of the shared memory
    rows: Sequence[str]  # offline requests that may leave, the first to leave first
    every: int  # layers between two safepoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """On the `ModelRunnerOutput`: what became of it."""

    left: frozenset[str] = (
        frozenset()
    )  # requests that computed nothing: their tokens are to be scheduled again
    kept: Mapping[str, int] = field(
        default_factory=dict
    )  # those that go on where they left -> at which layer
    joined: int = 0  # rows that did: the iteration took less time than its tokens tell
    layers_run: int = 0  # by who left, before they left
    layers: int = 0  # of the model
    separable: bool = False  # rows can leave while others go on
    safepoints: int = 0  # in the model; none means that nobody can leave
    heard: bool = True  # the flag could be read


def stamp_of(output: Any) -> Stamp | None:
    """The stamp of vLLM's `SchedulerOutput`, if it has one."""
    return getattr(output, NAME, None)


def outcome_of(output: Any) -> Outcome | None:
    """The outcome on vLLM's `ModelRunnerOutput`, if there is one."""
    return getattr(output, NAME, None)


def put(output: Any, note: Stamp | Outcome) -> None:
    """Attach it to vLLM's object."""
    setattr(output, NAME, note)
