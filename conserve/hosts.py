"""Names and addresses of hosts."""

import base64
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from urllib.parse import unquote, urlsplit

HERE = "127.0.0.1"
ALL = {"0.0.0.0": HERE, "::": "::1"}  # addresses of all networks, which this machine reaches at these
IPV4, IPV6 = (socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")
DOCUMENTED = {"0.0.0.0": (IPV4,), "::": (IPV6, IPV4)}  # no machine has these; by address listened at
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]*\]|[^:@\[\]]*)(:\d*)?")  # host and port, without a login
PROXIED = frozenset({"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"})


def is_proxied(headers: Iterable[str]) -> bool:
    """True if a request with these headers came through a proxy, which may stand for other machines."""
    return any(name.lower() in PROXIED for name in headers)


def is_loopback(host: str) -> bool:
    """True if only this machine reaches the host."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = (
        address.ipv4_mapped if isinstance(address, IPv6Address) else None
    )  # of a socket for both families
    return (mapped or address).is_loopback


def host_in(url: str) -> str:
    """Host that a URL of a header names; empty if it names none, or is no URL."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def url_of(host: str, port: int) -> str:
    """Address at which this machine reaches a server that listens there."""
    return f"http://{in_url(ALL.get(host, host))}:{port}"


def in_url(host: str) -> str:
    """Host as a URL has it: brackets are around an address of IPv6."""
    return f"[{host}]" if ":" in host else host


def server_root(url: str) -> str:
    """Address of a server without a slash or the /v1 at its end that clients of OpenAI are given."""
    return url.rstrip("/").removesuffix("/v1")


def url_elsewhere(host: str, port: int) -> str | None:
    """Address at which other machines reach a server that listens there; None if they do not."""
    if host not in ALL:
        return None if is_loopback(host) else url_of(host, port)
    address = outward_address(host)
    return url_of(address, port) if address else None


def outward_address(host: str) -> str | None:
    """Address of this machine, or container, on its default route; None without one to a server at `host`."""
    for family, documented in DOCUMENTED[host]:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((documented, 9))  # sends nothing
            address: str = probe.getsockname()[0]
            return address
    return None


def with_host(url: str, host: str) -> str:
    """A URL of this machine alone, with a name of the machine instead; another URL is left as it is."""
    parts = urlsplit(url)
    if parts.hostname is None or not is_loopback(parts.hostname):
        return url
    return f"{parts.scheme}://{host}{'' if parts.port is None else f':{parts.port}'}"


def this_boot() -> str:
    """Id of this boot of the machine; empty where the system has none."""
    try:
        return BOOT_ID.read_text()[:8]
    except OSError:
        return ""


def this_network() -> str:
    """Name of the network in which this process has its loopback: containers have their own. Empty off Linux."""
    try:
        return f"{boot}-{NETWORK.stat().st_ino:x}" if (boot := this_boot()) else ""
    except OSError:
        return ""


def split_login(url: str) -> tuple[str, tuple[str, str] | None]:
    """Split a URL into one that may be shown, and the name and password in it; None for these if it has none."""
    scheme, separator, rest = url.partition("://")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    login, at, host = authority.rpartition("@")
    if not at:
        return url, None
    name, _, password = login.partition(":")
    return f"{scheme}{separator}{host}{rest[len(authority) :]}", (unquote(name), unquote(password))


def without_login(text: str) -> str:
    """Address that may be shown, also one that is malformed because of its password."""
    shown, login = split_login(text)
    begin = SCHEME.match(text)
    if begin is not None:
        authority = re.split("[/?#]", text[begin.end() :], maxsplit=1)[0]
        if login is not None or AUTHORITY.fullmatch(authority):
            return shown  # an @ that is left is part of its path
    return f"{begin[0] if begin else ''}{text.rpartition('@')[2]}" if "@" in text else text


def about_login(text: str) -> str:
    """End of a sentence on a malformed address, if its password may be the cause."""
    odd = SCHEME.match(text) and without_login(text) != split_login(text)[0]
    return "; in a password / is written as %2F, ? as %3F, # as %23 and @ as %40" if odd else ""


def about_query(text: str) -> str:
    """Address and end of a sentence, if a query or fragment follows its path.

    These may hold a key, and are not shown.
    """
    shown, *more = re.split("[?#]", without_login(text), maxsplit=1)
    return f"{shown!r} with a query or fragment, which no request carries; leave it out" if more else ""


def basic(login: tuple[str, str]) -> str:
    """Header `Authorization` of a name and a password."""
    return f"Basic {base64.b64encode(':'.join(login).encode()).decode()}"


def bearer(key: str | None) -> dict[str, str]:
    """Header `Authorization` of a key; no header without one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def free_port() -> int:
    """Unused port of this machine."""
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        number: int = probe.getsockname()[1]
        return number
