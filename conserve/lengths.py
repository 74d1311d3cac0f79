"""Lengths of time in texts: `90m`, `8h`, `30d`."""

import re

SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}


def seconds_of(text: str) -> float | None:
    """Seconds of a number with its unit; None for other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip())
    return None if found is None else float(found[1]) * SECONDS[found[2]]
