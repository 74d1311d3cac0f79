"""Ways to damage a file."""

import random
from pathlib import Path

WAYS = ("truncated", "zeroed", "flipped", "removed")


def hurt(path: Path, way: str, dice: random.Random) -> str:
    """Damage a file somewhere; returns where."""
    content = bytearray(path.read_bytes())
    at = dice.randrange(len(content))
    if way == "removed":
        path.unlink()
    elif way == "truncated":
        path.write_bytes(content[:at])
    else:
        length = 1 if way == "flipped" else min(len(content) - at, dice.randrange(1, 2000))
        before = bytes(content)
        for index in range(at, at + length):
            content[index] = content[index] ^ (1 << dice.randrange(8)) if way == "flipped" else 0
        path.write_bytes(content)
        if bytes(content) == before:
            return "nowhere"
    return f"{way} at {at}"
