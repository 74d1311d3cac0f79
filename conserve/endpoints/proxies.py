"""Proxies that the environment names: HTTP_PROXY, HTTPS_PROXY and ALL_PROXY, but for the hosts of NO_PROXY."""

from ipaddress import ip_address, ip_network
from urllib.request import getproxies

import httpx

from conserve.hosts import is_loopback


def proxy_of(url: httpx.URL) -> str | None:
    """Address of the proxy on the way to a server; None for this machine, and for the hosts of NO_PROXY."""
    named = getproxies()
    proxy = named.get(url.scheme) or named.get("all")
    if not proxy or is_loopback(url.host) or is_exempt(url, named.get("no", "")):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def is_exempt(url: httpx.URL, names: str) -> bool:
    """True if one of these names, with commas between them, is of the server's host."""
    hosts = (url.host, url.netloc.decode("ascii"))
    return any(covers(name.strip().lower(), host) for name in names.split(",") for host in hosts)


def covers(name: str, host: str) -> bool:
    """True if a name of NO_PROXY is the host, its domain or its network such as 10.0.0.0/8, or stands for all."""
    if name == "*":
        return True
    try:
        return ip_address(host) in ip_network(name.strip("[]"), strict=False)
    except ValueError:  # one of the two is no address
        domain = name.lstrip(".")
        return bool(domain) and (host == domain or host.endswith(f".{domain}"))


def exempting(host: str) -> dict[str, str]:
    """Variables of a process that is to reach this host without a proxy."""
    names = ",".join(filter(None, (getproxies().get("no"), host)))
    return {"NO_PROXY": names, "no_proxy": names}
