"""Scorer of the suite `topic` in nightly.toml."""

from collections.abc import Mapping


def shared_words(answer: str, row: Mapping[str, object]) -> float:
    """Share of the answer's words that are in the question, 0 to 1."""
    known = set(str(row["question"]).lower().split())
    words = answer.lower().split()
    return sum(word in known for word in words) / max(1, len(words))
