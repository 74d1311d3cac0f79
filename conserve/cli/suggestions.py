"""Commands that a message names: the one that the user gave, or another over its store, without secrets."""

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence

from conserve.hosts import split_login, without_login
from conserve.variables import GIVEN

PASSWORDS = re.compile(r"(^[\w+.-]+://[^/?#@:]*:)[^/?#]*(?=@)|([?&]\w*password=)[^&]*", re.IGNORECASE)
SECRETS = ("-key", "-token", "-secret", "-password")  # ends of flags whose values are not shown
SUGGESTED = re.compile(r"(?<!^conserve: )(?<!^warning: )(?:(?<=: )|(?<=`))conserve (?=[a-z])")
"""Beginning of a command in a message: behind a colon, as in `run: conserve check`, or in backticks."""


def again() -> str:
    """The command line that this process, or the command that started it, was given."""
    return os.environ.get(GIVEN) or shlex.join(["conserve", *without_secrets(sys.argv[1:])])


def over_this_store(home: str | None, *words: str) -> str:
    """Command line over the store of this process: `home` is that of `--home`, and variables are named too."""
    named = {name: os.environ.get(name, "").strip() for name in ("CONSERVE_HOME", "CONSERVE_STORE")}
    named["CONSERVE_STORE"] = without_password(named["CONSERVE_STORE"])
    if home is not None:
        del named["CONSERVE_HOME"]  # the flag wins
    variables = [f"{name}={shlex.quote(value)}" for name, value in named.items() if value]
    return " ".join([*variables, at(home, shlex.join(words))])


def without_password(url: str) -> str:
    """URL of a database with the word PASSWORD in place of its password; a malformed one loses its login."""
    if without_login(url) != split_login(url)[0]:
        return without_login(url)
    return PASSWORDS.sub(lambda found: f"{found[1] or found[2]}PASSWORD", url)


def at_home(message: str) -> str:
    """A message whose suggested commands are of the store that the user named with `--home`."""
    return SUGGESTED.sub(lambda _: command(""), message)


def command(words: str) -> str:
    """A command of ConServe, with the `--home` of the command that the user gave."""
    given = iter(shlex.split(again())[1:])
    home = None
    for word in given:
        flag, equals, value = word.partition("=")
        if flag != "--home":
            break
        home = value if equals else next(given, None)
    return at(home, words)


def at(home: str | None, words: str) -> str:
    """A command of ConServe over the store in this folder, or over that of the settings."""
    return f"conserve {words}" if home is None else f"conserve --home {shlex.quote(home)} {words}"


def without_secrets(words: Sequence[str]) -> Iterator[str]:
    """Yield the words without flags of secrets and without logins in URLs."""
    rest = iter(words)
    for word in rest:
        flag, given, _ = word.partition("=")
        if flag.startswith("-") and flag.endswith(SECRETS):
            if not given:
                next(rest, None)
            continue
        yield without_login(word) if "://" in word else word
