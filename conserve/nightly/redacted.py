"""Addresses and flags without what is secret in them, for messages and records."""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from conserve.engine.runtime.vllm_flags import given_flags
from conserve.hosts import SCHEME, split_login, without_login

HIDDEN = "***"
SECRET_FLAGS = ("--api-key", "--hf-token")
SECRET = r"[\w-]*(?:api[_-]?key|token|password|passwd|secret|authorization)"
TEXT = r'''"""[\s\S]*?"""|\'\'\'[\s\S]*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\''''
ENTRY = re.compile(rf"(?i)((?<![\w-])[\"']?{SECRET}[\"']?\s*=\s*)(?:{TEXT})")  # of a table
FLAG = re.compile(r"(?i)(--(?:api[_-]key|hf[_-]token)(?:[\"']\s*,\s*[\"']|=|\s+))[^\"'\s]+")
QUERY = re.compile(rf"(?i)([?&]{SECRET}=)[^&#\s\"']+")
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"']+")
WEBHOOK = re.compile(r"(\bwebhook\s*=\s*[\"'])([^\"'\n]+)")


def address_of(given: str) -> str:
    """Address with a sign in place of user and password."""
    shown, login = split_login(given)
    return given if login is None else shown.replace("://", f"://{HIDDEN}@", 1)


def plan_text_of(given: str) -> str:
    """Text of a nightly.toml that still is one, with a sign in place of each secret."""
    shown = given
    for pattern, replaced in REPLACED:
        hidden = pattern.sub(replaced, shown)
        shown = hidden if is_toml(hidden) else shown
    return shown


def overrides_of(given: Mapping[str, str | int]) -> dict[str, str | int]:
    """Flags of `conserve eval run` with a sign in place of user and password."""
    return {
        name: ADDRESS.sub(_without_login, one) if isinstance(one, str) else one for name, one in given.items()
    }


def is_toml(text: str) -> bool:
    """True if the text can be read."""
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _without_login(found: re.Match[str]) -> str:
    """The address without user and password, also where a letter in the password makes it malformed."""
    address, begin = found[0], SCHEME.match(found[0])
    shown = without_login(address)
    return address if shown == address or begin is None else f"{begin[0]}{HIDDEN}@{shown[begin.end() :]}"


REPLACED: Sequence[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = (
    (WEBHOOK, lambda found: f"{found[1]}{host_of(found[2])}"),
    (ENTRY, rf'\g<1>"{HIDDEN}"'),
    (FLAG, rf"\g<1>{HIDDEN}"),
    (QUERY, rf"\g<1>{HIDDEN}"),
    (ADDRESS, _without_login),
)


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
