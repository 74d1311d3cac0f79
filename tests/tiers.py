"""Cases that `make test-full` tries alone: others of the same test notice the same faults in minutes."""

from typing import Any

import pytest


def in_full(*cases: Any) -> list[Any]:
    """These cases of a parametrized test, for `make test-full`; a tuple is one case of several arguments."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full)
        for case in cases
    ]
