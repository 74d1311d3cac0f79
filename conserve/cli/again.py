"""Command that goes on with what was interrupted: the one that the user gave, without its secrets."""

import os
import shlex
import sys
from collections.abc import Iterator, Sequence

from conserve.hosts import without_login

GIVEN = "CONSERVE_GIVEN"  # variable of processes that a command starts: that command
SECRETS = ("-key", "-token", "-secret", "-password")  # ends of flags whose values are not shown


def again() -> str:
    """The command line that this process, or the command that started it, was given."""
    return os.environ.get(GIVEN) or shlex.join(["conserve", *shown(sys.argv[1:])])


def shown(words: Sequence[str]) -> Iterator[str]:
    """Yield the words without flags of secrets and without logins in URLs."""
    rest = iter(words)
    for word in rest:
        flag, given, _ = word.partition("=")
        if flag.startswith("-") and flag.endswith(SECRETS):
            if not given:
                next(rest, None)
            continue
        yield without_login(word) if "://" in word else word
