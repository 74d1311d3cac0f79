"""Numbers in words, for progress and reports."""


def count(number: int, one: str, many: str | None = None) -> str:
    """Number with its noun: `1 row`, `2 rows`, `12,345 rows`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def duration(seconds: float) -> str:
    """Duration in words: `8.2 s`, `4 min 10 s`, `3 h 12 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
