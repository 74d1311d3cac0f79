"""Limit on nested JSON: readers and encoders on the way to an answer give up at a few hundred levels."""

from typing import Any

MAX_DEPTH = 100


def is_deeper(document: Any, levels: int) -> bool:
    """True if objects and lists nest deeper than `levels`."""
    layer = [document]
    for _ in range(levels):
        inner = [part for outer in layer for part in (outer.values() if isinstance(outer, dict) else outer)]
        layer = [part for part in inner if isinstance(part, dict | list)]
    return bool(layer)
