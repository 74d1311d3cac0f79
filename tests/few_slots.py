"""Rows that give their slots up in an engine of a few of them."""

from __future__ import annotations

from typing import Any

import pytest


def keep_no_slot(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows have all slots: none is kept for arrivals."""
    monkeypatch.setattr(scheduler.traffic, "expected", lambda **_: 0)


def parked_under_way(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the rows that are parked from now on with a token under way, or evicted in place of that."""
    from conserve.engine.vllm.scheduling import application

    under_way, park = list[str](), application.park

    def parking(of: Any, names: Any, now: float) -> None:
        under_way.extend(name for name in names if of.requests[name].num_in_flight_tokens)
        park(of, names, now)

    monkeypatch.setattr(application, "park", parking)
    return under_way
