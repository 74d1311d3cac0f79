"""Simulated blocks whose answers a test makes up."""

from dataclasses import dataclass
from typing import Any

from conserve.server_report import SchedulerReport
from tests.server_reports import report


@dataclass
class MadeUp:
    """A block in the form of `conserve.bench.simulated.PlayedBlock`."""

    began_s: float
    ended_s: float
    answers: list[Any]
    first: SchedulerReport
    last: SchedulerReport


@dataclass
class Answered:
    """A live request's answer."""

    token_at_s: list[float]


def counted(tokens: int, decode_steps: int, **counts: int) -> SchedulerReport:
    """A report of so many offline tokens and decode steps among them."""
    return report(offline={"tokens": tokens, "decode_steps": decode_steps}, **counts)
