"""Simulated blocks whose answers a test makes up."""

from dataclasses import dataclass
from typing import Any


@dataclass
class MadeUp:
    """A block in the form of `conserve.bench.simulated.PlayedBlock`."""

    began_s: float
    ended_s: float
    answers: list[Any]
    first: dict[str, Any]
    last: dict[str, Any]


@dataclass
class Answered:
    """A live request's answer."""

    token_at_s: list[float]
