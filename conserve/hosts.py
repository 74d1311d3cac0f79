"""Names and addresses of hosts."""

from ipaddress import IPv6Address, ip_address


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
