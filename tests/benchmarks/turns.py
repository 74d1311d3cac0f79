"""Turns of offline rows alone, on simulated time: an engine whose rows leave together or not at all.

`tests.benchmarks.simulation` says what is real and what is not. Each arm takes one thing away from the policy, so
that its column shows what that thing is worth (docs/adr/0012).
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from tests.benchmarks.report import Figure
from tests.benchmarks.simulation import (
    ALONE,
    OURS,
    RUN,
    UNINTERRUPTED,
    Seen,
    Setting,
    bursty,
    p99,
    phases,
    simulate,
)

COMMAND = "python -m tests.benchmarks turns"
BLOCKS = 4 * RUN
LEAST_MS = 1e-9  # a wait that says whose turn it is, and takes nothing off the promise


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to treat offline rows, and the share of its P99s to online-only's that it has to keep, if any."""

    name: str
    policy: str
    separable: bool = False
    at_most: float | None = None

    def changed(self) -> AbstractContextManager[Any]:
        """Take away what the arm does without."""
        return nullcontext()


class WithoutTurns(Arm):
    """Offline tokens go beside those of online requests alone."""

    def changed(self) -> AbstractContextManager[Any]:
        return patch("conserve.engine.policy.conserve.offline_turn_ms", return_value=0.0)


class WithoutWaits(Arm):
    """The iteration after a turn has the whole promise between two tokens."""

    def changed(self) -> AbstractContextManager[Any]:
        from conserve.engine.vllm.scheduling.observation import Picture

        waited_ms = Picture._waited_ms

        def whose_turn(picture: Picture, online: Sequence[Any]) -> float:
            return min(LEAST_MS, waited_ms(picture, online))

        return patch.object(Picture, "_waited_ms", whose_turn)


ARMS = (
    Arm("rows leave one by one", OURS, separable=True, at_most=1.1),
    Arm("turns", OURS, at_most=1.1),
    WithoutTurns("no turns", OURS),
    WithoutWaits("turns, waits not counted", OURS),
    Arm("rows never leave", UNINTERRUPTED),
)


def measure() -> list[Figure]:
    """Compare the arms over ON/OFF phases and over a bursty trace."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    settings = [replace(setting, blocks=BLOCKS) for setting in (phases(), bursty(0.4))]
    return list(itertools.chain.from_iterable(map(figures, settings)))


def figures(setting: Setting) -> Iterator[Figure]:
    """Four figures of each arm."""
    alone = simulate(setting, ALONE)
    for arm in ARMS:
        with arm.changed():
            seen = simulate(setting, arm.policy, alone.slo, separable=arm.separable)
        yield from of_arm(f"{setting.name}, {arm.name}", setting, seen, alone, arm.at_most)


def of_arm(name: str, setting: Setting, seen: Seen, alone: Seen, at_most: float | None) -> Iterator[Figure]:
    """P99s to online-only's, offline tokens per second, and what was computed in vain."""
    for latency, ours, theirs in (
        ("TTFT", seen.ttft_ms, alone.ttft_ms),
        ("TBT", seen.tbt_ms, alone.tbt_ms),
    ):
        ratio = p99(ours) / p99(theirs)
        yield Figure(
            name=f"{name}: P99 {latency} to online-only's",
            unit="",
            samples=[ratio],
            target=f"<= {at_most:g}" if at_most else "none",
            reached=not at_most or ratio <= at_most,
            command=COMMAND,
            note=f"of {sum(map(len, ours)):,}",
        )
    yield Figure(
        name=f"{name}: offline tokens",
        unit="/s",
        samples=[tokens / setting.block_s for tokens in seen.offline_tokens],
        target="none",
        reached=True,
        command=COMMAND,
        note=f"mean {sum(seen.offline_tokens) / (setting.block_s * setting.blocks):,.0f}; {seen.wasted:.2%} wasted",
    )
    yield Figure(
        name=f"{name}: online tokens computed twice",
        unit="",
        samples=[seen.live_tokens_recomputed],
        target="<= 0",
        reached=not seen.live_tokens_recomputed,
        command=COMMAND,
    )
