"""Names and addresses of hosts."""

import re
import socket
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address
from urllib.parse import unquote

HERE = "127.0.0.1"
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


def url_of(host: str, port: int) -> str:
    """Address at which this machine reaches a server that listens there."""
    address = HERE if host in ("0.0.0.0", "::") else host
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def split_login(url: str) -> tuple[str, tuple[str, str] | None]:
    """Split a URL into one that may be shown, and the name and password in it; None for these if it has none."""
    scheme, separator, rest = url.partition("://")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    login, at, host = authority.rpartition("@")
    if not at:
        return url, None
    name, _, password = login.partition(":")
    return f"{scheme}{separator}{host}{rest[len(authority) :]}", (unquote(name), unquote(password))


def free_port() -> int:
    """Unused port of this machine."""
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        number: int = probe.getsockname()[1]
        return number
