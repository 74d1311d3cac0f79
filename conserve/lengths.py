"""Lengths of time in texts: `90m`, `8h`, `30d`, and the `Retry-After` of HTTP."""

import re
from math import inf, isfinite

SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}


def seconds_of(text: str) -> float | None:
    """Seconds of a number with its unit; None for other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip())
    return None if found is None else float(found[1]) * SECONDS[found[2]]


def retry_after_s(text: str, *, now: float, most_s: float = inf) -> float | None:
    """Seconds, `most_s` at most, that a `Retry-After` asks for as a number or as a date; None for other text."""
    from email.utils import parsedate_to_datetime

    try:
        wish_s = float(text)
    except ValueError:
        try:
            wish_s = parsedate_to_datetime(text).timestamp() - now
        except (ValueError, TypeError, OverflowError):
            return None
    return min(max(0.0, wish_s), most_s) if isfinite(wish_s) or wish_s > 0 else None
