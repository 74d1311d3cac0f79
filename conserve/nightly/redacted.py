"""Addresses and flags without what is secret in them, for messages and records."""

from collections.abc import Sequence
from urllib.parse import urlsplit

from conserve.engine.runtime.vllm_flags import given_flags
from conserve.hosts import split_login

HIDDEN = "***"
SECRET_FLAGS = ("--api-key", "--hf-token")


def address_of(given: str) -> str:
    """Address with a sign in place of user and password."""
    shown, login = split_login(given)
    return given if login is None else shown.replace("://", f"://{HIDDEN}@", 1)


def host_of(given: str) -> str:
    """Scheme and host of an address: the path and the query of a webhook are its key."""
    try:
        parts = urlsplit(given)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return HIDDEN
    return f"{parts.scheme}://{host}" if parts.scheme and host else HIDDEN


def flags_of(words: Sequence[str]) -> str:
    """Flags as a line, with the values of secret ones hidden."""
    shown: list[str] = []
    for flag in given_flags(" ".join(words).split()):
        secret = flag.name in SECRET_FLAGS
        shown += [f"{flag.words[0].partition('=')[0]}={HIDDEN}"] if secret else flag.words
    return " ".join(shown)
