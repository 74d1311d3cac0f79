"""Addresses of servers: where a process that listens is reached."""

import socket
from typing import Any

import pytest

from conserve import hosts


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("gpu1", "http://gpu1:8000"),
        ("fd00::1", "http://[fd00::1]:8000"),
    ],
)
def test_a_server_is_reached_in_the_family_that_it_listens_in(host: str, url: str) -> None:
    assert hosts.url_of(host, 8000) == url


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "/v1//"])
def test_a_server_is_one_with_and_without_the_version_of_its_api(end: str) -> None:
    assert hosts.server_root(f"http://gpu1:8000/team{end}") == "http://gpu1:8000/team"
    assert hosts.server_root(f"http://gpu1:8000/v1/team{end}") == "http://gpu1:8000/v1/team"


@pytest.mark.parametrize(
    ("routes", "ipv4", "every"),
    [
        (
            {socket.AF_INET: "10.0.0.7", socket.AF_INET6: "fd00::7"},
            "http://10.0.0.7:8000",
            "http://[fd00::7]:8000",
        ),
        ({socket.AF_INET: "10.0.0.7"}, "http://10.0.0.7:8000", "http://10.0.0.7:8000"),
        ({socket.AF_INET6: "fd00::7"}, None, "http://[fd00::7]:8000"),
        ({}, None, None),
    ],
)
def test_others_reach_a_machine_in_the_family_that_its_server_listens_in(
    routes: dict[int, str], ipv4: str | None, every: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Probe:
        def __init__(self, family: int, kind: int) -> None:
            self.family = family

        def __enter__(self) -> "Probe":
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def connect(self, address: tuple[str, int]) -> None:
            if self.family not in routes:
                raise OSError("Network is unreachable")

        def getsockname(self) -> tuple[str, int]:
            return routes[self.family], 0

    monkeypatch.setattr(socket, "socket", Probe)
    assert hosts.url_elsewhere("0.0.0.0", 8000) == ipv4
    assert hosts.url_elsewhere("::", 8000) == every
    assert hosts.url_elsewhere("localhost", 8000) is None
