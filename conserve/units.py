"""Units: lengths of time, sizes and shares out of texts; counts, sizes and lengths of time in words.

A parser gives None for text of another form. What to write instead is for its caller to say.
"""

import re
from math import inf, isfinite

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
MILLISECONDS = {"ms": 1.0, "s": 1000.0, "": 1.0}
DECIMAL = ("B", "kB", "MB", "GB", "TB")
SIZE = re.compile(r"(\d+(?:\.\d*)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def parse_length(text: str) -> float | None:
    """Seconds of `90m`, `8h` or `30d`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip())
    return None if found is None else float(found[1]) * SECONDS[found[2]]


def parse_ms(text: str) -> float | None:
    """Milliseconds of `1500ms`, `1.5s` or a bare number."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|)", text.strip())
    return None if found is None else float(found[1]) * MILLISECONDS[found[2]]


def parse_retry_after(text: str, *, now: float, most_s: float = inf) -> float | None:
    """Seconds, `most_s` at most, that a header `Retry-After` asks for as a number or as a date."""
    from email.utils import parsedate_to_datetime

    try:
        wish_s = float(text)
    except ValueError:
        try:
            wish_s = parsedate_to_datetime(text).timestamp() - now
        except (ValueError, TypeError, OverflowError):
            return None
    return min(max(0.0, wish_s), most_s) if isfinite(wish_s) or wish_s > 0 else None


def parse_size(text: str) -> float | None:
    """Bytes of `512MiB`, `2GB` or a bare number; infinite for a number that no float holds."""
    found = SIZE.fullmatch(text.strip())
    if found is None:
        return None
    return float(found[1]) * (1024.0 if found[3] else 1000.0) ** " KMGT".index(found[2].upper() or " ")


def parse_share(text: str) -> float | None:
    """Share that `10%` or `2.5%` names: 0.1 or 0.025."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*%", text.strip())
    return None if found is None else float(found[1]) / 100


def count(number: int, one: str, many: str | None = None) -> str:
    """Number with its noun: `1 row`, `2 rows`, `12,345 rows`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def duration(seconds: float) -> str:
    """Length of time in words: `8.2 s`, `4 min 10 s`, `3 h 12 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def decimal_size(number: float) -> str:
    """Bytes in powers of a thousand, as `df -H` shows them: `12 B`, `3.4 kB`, `56.7 MB`."""
    for unit in DECIMAL:
        if number < 999.95 or unit == DECIMAL[-1]:
            break
        number /= 1000
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:,.1f} {unit}"


def binary_size(number: int) -> str:
    """Bytes in powers of 1024, as limits of memory are given: `512 MiB`, `1.5 GiB`."""
    return f"{number / GIB:.4g} GiB" if number >= GIB else f"{number / MIB:.4g} MiB"
