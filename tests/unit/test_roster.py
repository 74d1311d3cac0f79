"""Lists of servers: given ones, a file that changes, a name in DNS, pods of Kubernetes."""

import asyncio
import importlib
import json
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from conserve.endpoints.pods import Pods
from conserve.endpoints.roster import (
    Given,
    Joined,
    ListedServers,
    Resolved,
    roster_of,
    rosters_of,
    server_url,
)
from conserve.errors import EndpointUnusable, SettingsError

certificates = importlib.import_module("tests.break.certificates")  # a keyword is no name in an import


def look(roster: Any) -> Sequence[str]:
    return asyncio.run(roster.look())


def test_given_servers_are_named_once_and_without_a_route() -> None:
    assert look(Given(["http://a:8000/", "http://a:8000/v1", "https://b"])) == ["http://a:8000", "https://b"]


@pytest.mark.parametrize(
    "url",
    [
        "a:8000",
        "ftp://a",
        "http://",
        "http://a:port",
        "",
        "http://gpu\u20131:8000",
        "http://a:99999",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="takes an http:// or https:// address"):
        Given([url])


@pytest.mark.parametrize(
    "url", ["http://[::1]:8000", "http://gpu_1.example:80", "https://m\u00fcnchen.example"]
)
def test_what_is_an_address_is_taken(url: str) -> None:
    assert look(Given([url])) == [url]


def test_a_password_goes_along_with_an_address_and_is_in_no_sentence() -> None:
    assert look(Given(["http://ann:pass@a:8000/v1"])) == ["http://ann:pass@a:8000"]
    with pytest.raises(SettingsError, match="VALUE, not 'http://a:1'"):
        roster_of("http://ann:secret@a:1")
    with pytest.raises(SettingsError, match="address, not 'ftp://a'"):
        Given(["ftp://ann:pass@a"])


def write(path: Path, text: str) -> None:
    """Replace a file, as its editor should; its time differs whatever the clock's resolution."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def test_a_file_is_read_again_once_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text("http://a:8000  # the first\n\n# none\nhttp://b:8000\n")
    roster = roster_of(f"file://{path}")
    assert look(roster) == ["http://a:8000", "http://b:8000"]
    write(path, "http://b:8000\n")
    assert look(roster) == ["http://b:8000"]
    os.utime(path, ns=(1, 1))
    assert look(roster) == ["http://b:8000"]


def test_a_query_is_refused_and_not_shown() -> None:
    """It may hold a key."""
    with pytest.raises(SettingsError, match="--endpoint has 'http://a:8000/v1' with a query") as refused:
        server_url("http://a:8000/v1?key=secret")
    assert "secret" not in str(refused.value)


def test_a_file_that_is_gone_or_wrong_changes_nothing_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text("http://a:8000\n")
    joined = rosters_of(["http://c:8000"], [f"file://{path}"])
    assert look(joined) == ["http://c:8000", "http://a:8000"]
    assert joined.failure is None
    write(path, "b:8000\n")
    assert look(joined) == ["http://c:8000", "http://a:8000"]
    assert "a list of servers takes an http:// or https:// address, not 'b:8000'" in str(joined.failure)
    path.unlink()
    assert look(joined) == ["http://c:8000", "http://a:8000"]
    assert f"the list of servers {path} cannot be read" in str(joined.failure)


def test_a_name_in_dns_stands_for_all_its_addresses() -> None:
    found = ["10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1"]
    roster = Resolved("vllm", 8000, lambda host, port: found)
    assert look(roster) == ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000"]


def test_a_name_that_cannot_be_resolved_leaves_the_servers_that_are_known() -> None:
    answers: list[Any] = [["10.0.0.1"], OSError("Name or service not known")]

    def resolve(host: str, port: int) -> Sequence[str]:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    joined = Joined([Resolved("vllm", 8000, resolve)])
    assert look(joined) == look(joined) == ["http://10.0.0.1:8000"]
    assert str(joined.failure) == "no address of vllm is found: Name or service not known"


def test_the_systems_resolver_finds_this_machine() -> None:
    assert "http://127.0.0.1:8000" in look(roster_of("dns://localhost:8000"))


@pytest.mark.parametrize(
    ("resolved", "servers"),
    [
        (["fd00::1", "10.0.0.1", "10.0.0.2", "fd00::2"], ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]),
        (["fd00::1"], ["http://[fd00::1]:8000"]),
    ],
)
def test_a_server_with_addresses_of_both_families_is_one(
    resolved: list[str], servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def getaddrinfo(host: str, port: int, **_: object) -> list[object]:
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in resolved]
        pairs = zip(families, resolved, strict=True)
        return [(family, socket.SOCK_STREAM, 6, "", (address, port)) for family, address in pairs]

    roster = roster_of("dns://vllm:8000")
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert look(roster) == servers


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("dns://vllm", "needs a host and a port"),
        ("dns://vllm:port", "needs a host and a port"),
        ("http://vllm:8000", "a single server is --endpoint URL"),
        ("file:///nowhere/list", "there is no list of servers /nowhere/list"),
        ("k8s://models", "is not of the form k8s://"),
        ("k8s://models/app=vllm?port=http", "is not of the form k8s://"),
        ("k8s://models/app=vllm?port=²", "is not of the form k8s://"),
        ("k8s://models/app=vllm?port=0", "is not of the form k8s://"),
        ("k8s://models/app=vllm?port=99999", "is not of the form k8s://"),
        (f"k8s://models/app=vllm?port={'9' * 5000}", "is not of the form k8s://"),
        ("k8s://models/app=vllm", "this is no pod"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused(
    source: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SettingsError, match=said):
        roster_of(source)


class ApiServer(HTTPServer):
    """A stand-in for the API server of Kubernetes, over TLS: it lists pods to a caller with the token."""

    pods: list[dict[str, Any]]
    token: str
    asked: list[dict[str, list[str]]]


class Handler(BaseHTTPRequestHandler):
    server: ApiServer

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        self.server.asked.append(parse_qs(parts.query))
        known = self.headers["Authorization"] == f"Bearer {self.server.token}"
        status = 200 if known and parts.path == "/api/v1/namespaces/models/pods" else 403
        body = json.dumps({"kind": "PodList", "items": self.server.pods} if status == 200 else {}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of this machine's address in a folder of its own, with its key."""
    return certificates.self_signed(tmp_path_factory.mktemp("api") / "ca.crt")


@pytest.fixture
def api(authority: Path) -> Iterator[ApiServer]:
    running = ApiServer(("127.0.0.1", 0), Handler)
    running.socket = certificates.server_context(authority).wrap_socket(running.socket, server_side=True)
    running.pods, running.token, running.asked = [], "secret", []
    thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield running
    running.shutdown()
    running.server_close()
    thread.join()


def pods(api: ApiServer, authority: Path, *, query: str = "") -> Pods:
    (authority.parent / "token").write_text(f"{api.token}\n")
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(api.server_address[1])}
    return Pods.of(f"k8s://models/app=vllm,tier=big{query}", environ, account=authority.parent)


def pod(
    address: str | None, *, ready: bool = True, ends: bool = False, port: int | None = 8000
) -> dict[str, Any]:
    ports = [{"containerPort": port}] if port else []
    return {
        "metadata": {"name": "vllm", **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if ends else {})},
        "spec": {"containers": [{"name": "server", "ports": ports}, {"name": "sidecar"}]},
        "status": {
            "podIP": address,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def test_ready_pods_are_servers_and_those_that_end_are_not(api: ApiServer, authority: Path) -> None:
    api.pods = [
        pod("10.0.0.2"),
        pod("10.0.0.1", port=9000),
        pod("10.0.0.3", ready=False),
        pod("10.0.0.4", ends=True),
        pod(None),
        pod("10.0.0.5", port=None),
        {"metadata": {}, "spec": {}, "status": {}},
    ]
    assert look(pods(api, authority)) == ["http://10.0.0.1:9000", "http://10.0.0.2:8000"]
    assert look(pods(api, authority, query="?port=80")) == [
        *("http://10.0.0.1:80", "http://10.0.0.2:80"),
        "http://10.0.0.5:80",
    ]
    assert api.asked[0] == {"labelSelector": ["app=vllm,tier=big"]}


def test_the_account_of_the_pod_is_used_as_it_is_now(api: ApiServer, authority: Path) -> None:
    roster = pods(api, authority)
    api.pods = [pod("10.0.0.1")]
    assert look(roster) == ["http://10.0.0.1:8000"]
    api.token = "another"
    with pytest.raises(EndpointUnusable, match="answered 403; allow its account to list pods"):
        look(roster)
    (authority.parent / "token").write_text("another")
    assert look(roster) == ["http://10.0.0.1:8000"]


def test_a_certificate_of_another_authority_is_refused(
    api: ApiServer, authority: Path, tmp_path: Path
) -> None:
    certificates.self_signed(tmp_path / "ca.crt")
    (tmp_path / "token").write_text(api.token)
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(api.server_address[1])}
    with pytest.raises(EndpointUnusable, match="does not answer"):
        look(Pods.of("k8s://models/app=vllm", environ, account=tmp_path))
    assert not api.asked


def test_an_answer_that_lists_no_pods_is_named(api: ApiServer, authority: Path) -> None:
    api.pods = [{"metadata": 1}]
    with pytest.raises(EndpointUnusable, match="lists no pods"):
        look(pods(api, authority))


def test_the_selector_may_be_named_and_encoded(authority: Path) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1"}
    made = Pods.of("k8s://models/selector=app%20in%20(a,b)", environ, account=authority.parent)
    assert (made._selector, made._api) == ("app in (a,b)", "https://[fd00::1]:443")


def test_a_list_in_a_file_that_never_was_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(EndpointUnusable, match="cannot be read"):
        look(ListedServers(tmp_path / "none"))
