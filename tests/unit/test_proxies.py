"""The way to a server: proxies, none for this machine and for hosts and networks of NO_PROXY; certificates."""

import asyncio
import ssl
from contextlib import suppress
from typing import Any

import httpx
import pytest

from conserve.endpoints.exchange import _certificates, open_client, transport_to
from conserve.endpoints.proxies import proxy_of

PROXY = "http://proxy.example:3128"


def transport_of(url: str) -> Any:
    return transport_to(httpx.URL(url), httpx.Limits())


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxies but those of a test."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://localhost:8000", "https://[::1]:8000"])
def test_this_machine_has_no_proxy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", PROXY)
    assert proxy_of(httpx.URL(url)) is None


@pytest.mark.parametrize(
    ("url", "exempt", "direct"),
    [
        ("http://10.1.2.3:8000", "", False),
        ("http://10.1.2.3:8000", "10.0.0.0/8", True),
        ("http://10.1.2.3:8000", "example.com, 10.1.2.3", True),
        ("http://10.1.2.3:8000", "10.1.2.3:8000", True),
        ("http://10.1.2.3:8000", "10.1.2.3:8001", False),
        ("http://11.1.2.3:8000", "10.0.0.0/8,fd00::/8", False),
        ("http://[fd00::7]:8000", "10.0.0.0/8,fd00::/8", True),
        ("http://[fd00::7]:8000", "[fd00::7]", True),
        ("http://gpu-1.example.com", "example.com", True),
        ("http://gpu-1.example.com", ".example.com", True),
        ("http://gpu-1.badexample.com", "example.com", False),
        ("http://gpu-1.example.com:8000", "GPU-1.example.com:8000", True),
        ("http://gpu-1.example.com", "10.0.0.0/8, *", True),
    ],
)
def test_a_host_or_a_network_of_no_proxy_has_none(
    url: str, exempt: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", PROXY)
    monkeypatch.setenv("NO_PROXY", exempt)
    assert proxy_of(httpx.URL(url)) == (None if direct else PROXY)


def test_a_proxy_is_that_of_the_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    url = httpx.URL("https://gpu-1.example.com")
    monkeypatch.setenv("http_proxy", PROXY)
    assert proxy_of(url) is None
    monkeypatch.setenv("all_proxy", "all.example:3128")
    assert proxy_of(url) == "http://all.example:3128"
    monkeypatch.setenv("https_proxy", "https.example:3128")
    assert proxy_of(url) == "http://https.example:3128"


def test_certificates_are_read_once_and_for_https_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[ssl.SSLContext] = []
    make = httpx.create_ssl_context

    def noted() -> ssl.SSLContext:
        read.append(make())
        return read[-1]

    monkeypatch.setattr(httpx, "create_ssl_context", noted)
    _certificates.cache_clear()
    contexts = [transport_of(f"https://gpu-{number}")._pool._ssl_context for number in range(3)]
    plain = transport_of("http://gpu-1")._pool._ssl_context
    assert contexts == read * 3
    assert plain not in read
    assert plain is not None
    assert plain.cert_store_stats()["x509"] == 0
    _certificates.cache_clear()


def test_a_key_for_this_machine_goes_to_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other servers are reached through it."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async def get(base_url: str) -> None:
        async with open_client(base_url, "sesame", None) as client:
            await client.get("/")

    async def go() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
        here, there = (found.sockets[0].getsockname()[1] for found in (server, proxy))
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{there}")
        await get(f"http://127.0.0.1:{here}")
        await get("http://gpu-1.example")
        for listening in (server, proxy):
            listening.close()
            await listening.wait_closed()

    asyncio.run(go())
    assert [head.split(b"\r\n")[0] for head in asked] == [
        b"GET / HTTP/1.1",
        b"GET http://gpu-1.example/ HTTP/1.1",
    ]
