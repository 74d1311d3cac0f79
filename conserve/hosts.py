"""Names and addresses of hosts."""

import re
import socket
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from urllib.parse import unquote, urlsplit

HERE = "127.0.0.1"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")
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


def url_elsewhere(host: str, port: int) -> str | None:
    """Address at which other machines reach a server that listens there; None if they do not."""
    if host not in ("0.0.0.0", "::"):
        return None if is_loopback(host) else url_of(host, port)
    address = outward_address()
    return url_of(address, port) if address else None


def outward_address() -> str | None:
    """Address of this machine, or container, on the network of its default route; None without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; an address for documentation
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return address


def with_host(url: str, host: str) -> str:
    """A URL of this machine alone, with a name of the machine instead; another URL is left as it is."""
    parts = urlsplit(url)
    if parts.hostname is None or not is_loopback(parts.hostname):
        return url
    return f"{parts.scheme}://{host}{'' if parts.port is None else f':{parts.port}'}"


def this_network() -> str:
    """Name of the network in which this process has its loopback: containers have their own. Empty off Linux."""
    try:
        return f"{BOOT_ID.read_text()[:8]}-{NETWORK.stat().st_ino:x}"
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


def free_port() -> int:
    """Unused port of this machine."""
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        number: int = probe.getsockname()[1]
        return number
