"""Sizes in bytes, as flags and settings name them."""

import re

from conserve.errors import SettingsError

SIZE = re.compile(r"(\d+(?:\.\d*)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
MOST = 1 << 63  # bytes that the operating system cannot count any more


def size_bytes(name: str, text: str) -> int:
    """Parse `512MiB`, `2GB` or a number of bytes; raises `SettingsError` for zero and for other text."""
    found = SIZE.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise SettingsError(f"{name} takes a size like 4GiB or 500MB, not {text!r}")
    number = float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " ")
    if number >= MOST:
        raise SettingsError(f"{name} takes a size below 8388608TiB, not {text:.40}")
    return int(number)
