"""Addresses that messages may go to: public ones alone, unless a hook allows others.

A receiver's URL comes from a person, and its name from a DNS server that may answer anything, and another thing the
next time. So the addresses are checked that the connection is made to, not the name.
"""

import socket
from collections.abc import Callable, Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit

from conserve.errors import UsageError, one_line
from conserve.hosts import about_login, without_login

Address = IPv4Address | IPv6Address
Resolve = Callable[[str, int], list[Address]]

UNICAST = IPv6Network("2000::/3")  # the only public IPv6 addresses there are
SPECIAL_V4 = (IPv4Network("192.0.0.0/24"), IPv4Network("192.88.99.0/24"))  # global to some versions of Python
# Tunnels to IPv4, and documentation.
SPECIAL_V6 = tuple(map(IPv6Network, ("2001::/23", "2002::/16", "3fff::/20")))
NAT64 = IPv6Network("64:ff9b::/96")  # IPv4 addresses as an IPv6-only network reaches them
MOST_URL = 2000


class NotPublic(Exception):
    """A receiver's name leads to private addresses alone."""


def is_public(address: Address) -> bool:
    """True if the address is of the public Internet, as is any IPv4 address within it."""
    if isinstance(address, IPv4Address):
        special = address.is_multicast or address.is_reserved or any(address in block for block in SPECIAL_V4)
        return address.is_global and not special
    if address in NAT64:
        return is_public(IPv4Address(int(address) & 0xFFFF_FFFF))
    return address in UNICAST and address.is_global and not any(address in block for block in SPECIAL_V6)


def resolved(host: str, port: int) -> list[Address]:
    """Addresses of a host; raises `OSError` without any."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(ip_address(place[0]) for *_, place in found))


def allowed(found: Iterable[Address], *, private: bool) -> list[Address]:
    """Addresses to connect to; raises `NotPublic` if there is none."""
    kept = [address for address in found if private or is_public(address)]
    if not kept:
        raise NotPublic("its address is private; if it is yours: conserve hooks add --allow-private")
    return kept


def checked_url(url: str, *, private: bool) -> str:
    """The URL of a hook; raises `UsageError` for one that no message would be sent to."""
    shown = one_line(without_login(url), most=80)
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        why = about_login(url) or f": {error}"  # the error may repeat a part of the password
        raise UsageError(f"{shown!r} is no URL{why}") from error
    if parts.scheme not in ("http", "https") or not host or len(url) > MOST_URL or not url.isascii():
        raise UsageError(f"{shown!r} is no URL; write https://HOST/PATH")
    if not url.isprintable() or " " in url:
        raise UsageError(f"{shown!r} has a space or a control character; write it as %20")
    if parts.username is not None:
        raise UsageError(
            "a hook's URL has no user and no password; the receiver checks the signature instead"
        )
    if private:
        return url
    if parts.scheme != "https":
        raise UsageError("messages go by https://; for http:// in your own network add --allow-private")
    refuse_private(host)
    return url


def refuse_private(host: str) -> None:
    """Raise `UsageError` for a private address; a name is looked up at each attempt."""
    try:
        private = host == "localhost" or not is_public(ip_address(host))
    except ValueError:
        return
    if private:
        raise UsageError(f"{host} is an address of your own network; to send there add --allow-private")
