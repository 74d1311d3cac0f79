"""Servers in Kubernetes: the ready pods that a label selects, by the API server and the pod's own account."""

import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl, unquote, urlsplit

import httpx
import msgspec

from conserve.endpoints.exchange import short_response
from conserve.errors import EndpointUnusable, SettingsError, one_line
from conserve.hosts import bearer, in_url, url_of, without_login

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LOOK_S = 5.0  # for an answer of the API server
PODS_S = 2.0  # between two looks
FORM = "k8s://NAMESPACE/LABEL=VALUE?port=8000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition of a pod."""

    type: str
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A port that a container names."""

    containerPort: int  # noqa: N815  the API's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container of a pod."""

    ports: list[Port] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Containers of a pod."""

    containers: list[Container] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodStatus:
    """State of a pod."""

    podIP: str | None = None  # noqa: N815  the API's name
    conditions: list[Condition] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """A pod's name, and the moment from which it ends."""

    name: str = ""
    deletionTimestamp: str | None = None  # noqa: N815  the API's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """The used part of a pod."""

    metadata: Metadata = field(default_factory=Metadata)
    spec: Spec = field(default_factory=Spec)
    status: PodStatus = field(default_factory=PodStatus)

    @property
    def ready(self) -> bool:
        """True if it takes requests and was not told to end."""
        conditions = self.status.conditions or []
        ready = any(one.type == "Ready" and one.status == "True" for one in conditions)
        return ready and self.metadata.deletionTimestamp is None and self.status.podIP is not None

    def url(self, port: int | None) -> str | None:
        """URL of its server: at this port, or at the first that a container names."""
        named = [one.containerPort for container in self.spec.containers for one in container.ports or []]
        found = port or next(iter(named), None)
        return url_of(self.status.podIP or "", found) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodList:
    """The answer of the API server."""

    items: list[Pod]


def is_port(text: str) -> bool:
    """True for the number of a TCP port."""
    return text.isascii() and text.isdigit() and 0 < int(text[:6]) < 65_536


class Pods:
    """The ready pods of a namespace with these labels. A pod that ends leaves at once, before its server does."""

    every_s: float | None = PODS_S

    def __init__(
        self, namespace: str, selector: str, port: int | None, *, api: str, account: Path = ACCOUNT
    ) -> None:
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._selector, self._port = selector, port
        self._api, self._account = api, account

    @classmethod
    def of(cls, source: str, environ: Mapping[str, str] = os.environ, *, account: Path = ACCOUNT) -> Self:
        """Read `k8s://namespace/app=vllm?port=8000`; raises `SettingsError`, also outside of Kubernetes."""
        parts = urlsplit(source)
        asked = dict(parse_qsl(parts.query))
        selector = unquote(parts.path.strip("/"))
        if selector.startswith("selector="):
            selector = selector.removeprefix("selector=")
        port = asked.pop("port", None)
        if not parts.netloc or not selector or asked or not (port is None or is_port(port)):
            raise SettingsError(f"--endpoints {without_login(source)} is not of the form {FORM}")
        host = environ.get("KUBERNETES_SERVICE_HOST")
        if not host:
            raise SettingsError(
                f"--endpoints {without_login(source)} asks the API server of Kubernetes, and this is no pod: "
                "KUBERNETES_SERVICE_HOST is not set; use dns:// or file:// elsewhere"
            )
        api = f"https://{in_url(host)}:{environ.get('KUBERNETES_SERVICE_PORT', '443')}"
        return cls(parts.netloc, selector, int(port) if port else None, api=api, account=account)

    async def look(self) -> Sequence[str]:
        path = httpx.URL(self._path, params={"labelSelector": self._selector})
        try:
            async with self._opened() as client:
                reply = await short_response(client, "GET", str(path), seconds=LOOK_S)
        except (httpx.HTTPError, OSError) as error:
            raise EndpointUnusable(
                f"the API server of Kubernetes does not answer: {one_line(error)}"
            ) from error
        if reply.status != 200:
            hint = "; allow its account to list pods" if reply.status in (401, 403) else ""
            raise EndpointUnusable(f"the API server of Kubernetes answered {reply.status}{hint}")
        try:
            pods = msgspec.json.decode(reply.content, type=PodList).items
        except msgspec.DecodeError as error:
            raise EndpointUnusable(
                f"the API server of Kubernetes lists no pods: {one_line(error)}"
            ) from error
        urls = (pod.url(self._port) for pod in pods if pod.ready)
        return sorted(url for url in urls if url is not None)

    def _opened(self) -> httpx.AsyncClient:
        """A client with the account's token and authority as they are now: Kubernetes replaces both."""
        authority = self._account / "ca.crt"
        trusted = ssl.create_default_context(cafile=str(authority)) if authority.is_file() else True
        token = (self._account / "token").read_text().strip()
        return httpx.AsyncClient(base_url=self._api, headers=bearer(token), verify=trusted, trust_env=False)
