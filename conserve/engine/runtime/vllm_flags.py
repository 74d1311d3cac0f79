"""Flags of vLLM as they stand on a command line, read as vLLM reads them. Needs no vLLM."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

LONG = {
    "-ac": "--attention-config",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-dp": "--data-parallel-size",
    "-dpb": "--data-parallel-backend",
    "-n": "--nnodes",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}
"""Long names of short ones, as far as one is asked for here or has JSON keys behind it."""


class GivenFlag(NamedTuple):
    """A flag with the values behind it; its name is long and has dashes."""

    name: str
    values: Sequence[str]
    words: Sequence[str]  # as they were given
    key: str = ""  # of a JSON object: `a.b` of `--name.a.b 1`

    @property
    def value(self) -> str:
        """The first value; empty for a switch."""
        return self.values[0] if self.values else ""


def given_flags(words: Sequence[str]) -> Iterator[GivenFlag]:
    """Yield the flags in the order of the command line; words before the first one have an empty name."""
    starts = [place for place, word in enumerate(words) if is_flag(word) or place == 0]
    for start, end in pairwise([*starts, len(words)]):
        group = words[start:end]
        if not is_flag(group[0]):
            yield GivenFlag("", group, group)
            continue
        named, joined, value = group[0].partition("=")
        if named[:2] in LONG and len(named) > 2:  # -n2 is -n 2
            named, joined, value = named[:2], "=", group[0][2:]
        name, _, key = named.partition(".")
        name = name.replace("_", "-")
        values = [value, *group[1:]] if joined else group[1:]
        yield GivenFlag(LONG.get(name, name), values, group, key)


def is_flag(word: str) -> bool:
    """True for the name of a flag; a number below zero is a value."""
    return word.startswith("-") and not word[1:2].isdigit() and word[1:2] not in ("", ".")


def names_of(words: Sequence[str]) -> list[str]:
    """Names of the flags, in the order of the command line."""
    return [flag.name for flag in given_flags(words) if flag.name]


def value_of(words: Sequence[str], name: str) -> str | None:
    """Value of a flag, of which the last one counts; None if it is not given, empty for a switch."""
    return next((flag.value for flag in reversed([*given_flags(words)]) if flag.name == name), None)
