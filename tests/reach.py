"""Guarded assertions: a property whose examples hardly ever come to its assertion is no test."""

import math
from collections import Counter

import hypothesis

LEAST = 0.1  # of the examples that come to a guard, those that it lets through
ENOUGH = 100  # examples from which on a guard is judged
ENOUGH_FOR_NONE = 25  # derandomised examples of which none is too few, as many as most properties try

_asked: Counter[str] = Counter()
_passed: Counter[str] = Counter()


def reached(what: str, guard: object) -> bool:
    """True if the guard holds. A test fails at its end if that was so for fewer than one example in ten."""
    _asked[what] += 1
    _passed[what] += bool(guard)
    return bool(guard)


def begin() -> None:
    """Forget what other tests counted."""
    _asked.clear()
    _passed.clear()


def counts() -> dict[str, tuple[int, int]]:
    """Number of examples that each guard let through, and number of those that came to it."""
    return {what: (_passed[what], asked) for what, asked in _asked.items()}


def seldom_reached() -> list[str]:
    """Guards that let too few examples through, by more than chance explains.

    Hypothesis draws constants from the modules that are loaded, so even derandomised examples differ with the tests
    that share a process. Random ones may be unlucky: there it is one at all.
    """
    derandomised = hypothesis.settings.default.derandomize
    for_none = ENOUGH_FOR_NONE if derandomised else ENOUGH
    return [
        f"{what}: {passed} of {asked} examples"
        for what, (passed, asked) in counts().items()
        if (asked >= for_none and not passed) or (asked >= ENOUGH and derandomised and passed < _least(asked))
    ]


def _least(asked: int) -> float:
    """Two standard deviations below the number of examples that a guard at `LEAST` lets through."""
    return LEAST * asked - 2 * math.sqrt(asked * LEAST * (1 - LEAST))
