"""Cases that `make test-full` tries alone: others of the same test notice the same faults in minutes."""

from collections.abc import Collection, Mapping
from typing import Any

import pytest


def in_full(*cases: Any) -> list[Any]:
    """These cases of a parametrized test, for `make test-full`; a tuple is one case of several arguments."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full)
        for case in cases
    ]


def named(cases: Mapping[str, Any], *, in_minutes: Collection[str]) -> list[Any]:
    """Cases by name; `make test` tries those `in_minutes`, and `make test-full` all."""
    return [
        pytest.param(case, id=name, marks=[] if name in in_minutes else pytest.mark.full)
        for name, case in cases.items()
    ]
