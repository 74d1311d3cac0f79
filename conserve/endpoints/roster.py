"""Lists of servers, which may change while a harvester runs: given ones, a file, a name in DNS."""

import asyncio
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from conserve.errors import EndpointUnusable, SettingsError, one_line
from conserve.hosts import about_login, about_query, server_root, url_of, without_login

FILE_S = 1.0  # between two looks at a file's time of change
DNS_S = 3.0  # between two resolutions

Resolve = Callable[[str, int], Sequence[str]]

PLAIN_HOST = re.compile(r"[\w.:%-]+", re.ASCII)


class Roster(Protocol):
    """A list of servers."""

    every_s: float | None  # seconds between two looks; None: it never changes

    async def look(self) -> Sequence[str]:
        """URLs of the servers, in a fixed order; raises `EndpointUnusable` if they cannot be found out now."""


class Given:
    """Servers named on the command line."""

    every_s: float | None = None

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = list(dict.fromkeys(map(server_url, urls)))

    async def look(self) -> Sequence[str]:
        return self._urls


class ListedServers:
    """Servers in a file, one URL a line; a `#` begins a comment. The file is read again once it has changed."""

    every_s: float | None = FILE_S

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[object, list[str]] = None, []

    async def look(self) -> Sequence[str]:
        try:
            found = self._path.stat()
            version = found.st_mtime_ns, found.st_ino, found.st_size
            if version != self._read[0]:
                self._read = version, urls_in(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, SettingsError) as error:
            raise EndpointUnusable(f"the list of servers {self._path} cannot be read: {error}") from error
        return self._read[1]


class Resolved:
    """Servers behind a name in DNS: each of its addresses is one."""

    every_s: float | None = DNS_S

    def __init__(self, host: str, port: int, resolve: Resolve | None = None) -> None:
        self._host, self._port, self._resolve = host, port, resolve or addresses

    async def look(self) -> Sequence[str]:
        try:
            found = await asyncio.to_thread(self._resolve, self._host, self._port)
        except OSError as error:
            raise EndpointUnusable(f"no address of {self._host} is found: {one_line(error)}") from error
        return [url_of(address, self._port) for address in sorted(set(found))]


class Joined:
    """Several lists as one; one that cannot be found out stays as it was, unless it was never known."""

    def __init__(self, rosters: Sequence[Roster]) -> None:
        self._rosters = list(rosters)
        self._known: dict[int, Sequence[str]] = {}
        times_s = [roster.every_s for roster in rosters if roster.every_s is not None]
        self.every_s: float | None = min(times_s, default=None)
        self.failure: EndpointUnusable | None = None  # of the last look

    async def look(self) -> Sequence[str]:
        self.failure = None
        for number, roster in enumerate(self._rosters):
            try:
                self._known[number] = await roster.look()
            except EndpointUnusable as error:
                self.failure = error
        return list(dict.fromkeys(url for number in sorted(self._known) for url in self._known[number]))


def rosters_of(endpoints: Sequence[str], sources: Sequence[str]) -> Joined:
    """The servers of `--endpoint` and `--endpoints`; raises `SettingsError`."""
    given: list[Roster] = [Given(endpoints)] if endpoints else []
    return Joined([*given, *map(roster_of, sources)])


def roster_of(source: str) -> Roster:
    """A list of servers by its address: `file://`, `dns://` or `k8s://`; raises `SettingsError`."""
    scheme, _, rest = source.partition("://")
    if scheme == "file" and rest:
        path = Path(rest).expanduser()
        if not path.is_file():
            raise SettingsError(f"there is no list of servers {path}; write one URL a line into it")
        urls_in(path.read_text(encoding="utf-8", errors="replace"))
        return ListedServers(path)
    if scheme == "dns" and rest:
        host, port = host_and_port(source)
        return Resolved(host, port)
    if scheme == "k8s" and rest:
        from conserve.endpoints.pods import Pods

        return Pods.of(source)
    raise SettingsError(
        "--endpoints takes file://LIST, dns://HOST:PORT or k8s://NAMESPACE/LABEL=VALUE, "
        f"not {without_login(source)!r}; a single server is --endpoint URL"
    )


def urls_in(text: str) -> list[str]:
    """URLs in the text of a list; raises `SettingsError` for a line that is none."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return list(dict.fromkeys(server_url(line, given_as="a list of servers") for line in lines if line))


def server_url(text: str, *, given_as: str = "--endpoint") -> str:
    """Address of a server without a slash or /v1 at its end; raises `SettingsError` if it is none."""
    url = server_root(text.strip())
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        known = known and (PLAIN_HOST.fullmatch(parts.hostname or "") is not None or is_address(url))
    except ValueError:
        known = False
    if not known:
        raise SettingsError(
            f"{given_as} takes an http:// or https:// address, not {without_login(text)!r}{about_login(text)}"
        )
    if odd := about_query(url):
        raise SettingsError(f"{given_as} has {odd}")
    return url


def is_address(url: str) -> bool:
    """True for an address that requests can be sent to; asked of odd hosts alone, since it loads httpx."""
    from conserve.endpoints.exchange import check_address

    try:
        check_address(url)
    except SettingsError:
        return False
    return True


def host_and_port(source: str) -> tuple[str, int]:
    """Host and port of `dns://HOST:PORT`; raises `SettingsError`."""
    try:
        parts = urlsplit(source)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise SettingsError(
            f"--endpoints {without_login(source)} needs a host and a port, as dns://vllm:8000"
        )
    return host, port


def addresses(host: str, port: int) -> Sequence[str]:
    """IPv4 addresses of a host by the system's resolver, else IPv6 ones; none if the name exists without any."""
    try:
        found: list[Any] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno == getattr(socket, "EAI_NODATA", None):
            return []
        raise
    # With both families, each server would be there twice.
    first = [entry for entry in found if entry[0] == socket.AF_INET] or found
    return [str(entry[4][0]) for entry in first]
