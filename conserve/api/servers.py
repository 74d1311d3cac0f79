"""Servers that harvesters feed: where they are, and what each says of itself.

Imports nothing heavy: `conserve status` asks through it.
"""

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from conserve import hosts
from conserve.config import Settings
from conserve.errors import SettingsError
from conserve.jobs.harvest.services import running
from conserve.units import duration

if TYPE_CHECKING:
    from conserve.server_report import SchedulerReport

ANSWER_S = 2.0
ASKED_AT_ONCE = 16  # of servers that may not answer
NOT_FOUND = 404
ENDED = "does not answer (starting, or ended)"  # nothing listens at its address
WANTS_KEY = "wants another key; set CONSERVE_API_KEY"
REFUSES_LOGIN = "refuses the login in its address"
OTHER_VERSION = "runs another version of ConServe; update it, or this one"


class Unreported(NamedTuple):
    """A server that tells no report."""

    error: str | None
    """Why it tells none; None if it runs without ConServe's scheduler."""


STOCK = Unreported(None)


def addresses(settings: Settings, endpoints: Sequence[str] = ()) -> dict[str, str]:
    """Addresses of the servers to look at, perhaps with a login, by those that may be shown.

    They run over this store, or are named; without `endpoints` the one of the settings counts as named. All that
    show servers take them from here.
    """
    named = endpoints or ([settings.endpoint] if settings.endpoint else [])
    return {server.url: server.url for server in running(settings)} | by_shown(named)


def logins(settings: Settings) -> Mapping[str, str]:
    """Addresses that the settings and the files that these name have for servers, by those that notes have."""
    from conserve.endpoints.roster import urls_in
    from conserve.jobs.harvest.notes import of_this_machine

    named = [settings.endpoint] if settings.endpoint else []
    for source in (settings.endpoints or "").split():
        if source.startswith("file://"):
            # Errors of a list are the harvester's to tell.
            with suppress(OSError, UnicodeDecodeError, SettingsError):
                path = Path(source.removeprefix("file://")).expanduser()
                named += urls_in(path.read_text(encoding="utf-8"))
    known = by_shown(named)
    return {of_this_machine(shown): address for shown, address in known.items()} | known


def by_shown(named: Sequence[str]) -> dict[str, str]:
    """Addresses of servers by those that may be shown."""
    urls = [hosts.server_root(url) for url in named if url.startswith(("http://", "https://"))]
    return {hosts.split_login(url)[0]: url for url in urls}


def bearer(settings: Settings) -> dict[str, str]:
    """Authorization header for a server's own routes, with the API key, else the harvester's key."""
    return hosts.bearer(settings.api_key or settings.harvest_key)


def ask(address: str, settings: Settings, *, seconds: float = ANSWER_S) -> "SchedulerReport | Unreported":
    """Ask a server for `GET /v1/conserve`, through the standard library, which imports faster than httpx.

    A login in the address is sent in place of a key, as harvesters do. Figures are `age_s` old: those of the last
    answer of the scheduler, which may be older than the iteration under way.
    """
    import http.client
    import urllib.error
    import urllib.request

    from conserve.server_report import RECENT, UNREADABLE

    class Unfollowed(urllib.request.HTTPRedirectHandler):
        """Follows no redirect: the key is for this server alone."""

        def redirect_request(self, *_: Any) -> None:
            return None

    url, login = hosts.split_login(address)
    headers = {"Authorization": hosts.basic(login)} if login else bearer(settings)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), Unfollowed)
    try:
        request = urllib.request.Request(f"{url}{RECENT}", headers=headers)
        with opener.open(request, timeout=seconds) as answer:
            return understood(answer.read())
    except (OSError, *UNREADABLE, http.client.HTTPException) as error:
        if getattr(error, "code", None) == NOT_FOUND:  # an HTTPError's
            return STOCK
        return Unreported(unanswered(error, login))


def understood(content: bytes) -> "SchedulerReport | Unreported":
    """The report in an answer; raises one of `server_report.UNREADABLE` for what is no JSON."""
    import msgspec

    from conserve.server_report import UNREADABLE, read_front_end, read_scheduler

    try:
        return read_scheduler(content)
    except msgspec.ValidationError:
        with suppress(*UNREADABLE):
            read_front_end(content)
            return Unreported(OTHER_VERSION)
        return STOCK


def unanswered(error: Exception, login: tuple[str, str] | None = None) -> str:
    """Reason that a server did not answer a request with this login, or with a key."""
    if getattr(error, "code", None) in (401, 403):  # an HTTPError's
        return REFUSES_LOGIN if login else WANTS_KEY
    cause = getattr(error, "reason", error)  # a URLError's
    if isinstance(cause, socket.gaierror):
        return "runs there, and has no address that is known here"
    if isinstance(cause, ConnectionRefusedError):
        return ENDED
    return f"does not answer{' (busy)' if isinstance(cause, TimeoutError) else ''}"


def aged(age_s: float | None) -> str | None:
    """Age of figures in words; None if they are of now."""
    from conserve.server_report import WITHIN_S

    if age_s is None or age_s <= WITHIN_S:
        return None
    return f"{duration(age_s)} ago (its scheduler has not answered since)"
