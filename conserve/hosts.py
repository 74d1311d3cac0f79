"""Names and addresses of hosts."""

from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address

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
