"""Names and addresses of hosts."""

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """True if only this machine reaches the host."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
