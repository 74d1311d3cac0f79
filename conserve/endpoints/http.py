"""Any OpenAI-compatible HTTP server as an endpoint: vLLM, or whatever speaks the same routes."""

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx

from conserve.endpoints.protocol import Call, Choice, Completion, OnTokens, Url
from conserve.errors import (
    EndpointBusy,
    EndpointError,
    EndpointFault,
    EndpointUnavailable,
    EndpointUnusable,
    RequestRejected,
)

CONNECT_S = 10.0
ANSWER_S = 1800.0  # an offline request may wait long behind online traffic
TOO_LONG = ("context length", "maximum model length", "too long", "max_model_len", "maximum context")


class HttpEndpoint:
    """Implements `Endpoint` over HTTP. Tokens are not visible, so rows cut short start over."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        concurrency: int = 64,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._concurrency = concurrency
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(
            base_url=self.base_url,
            headers=headers,
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            transport=transport,
        )

    @property
    def identity(self) -> str:
        return f"{self.base_url} {self.model}"

    @property
    def capacity(self) -> int:
        return self._concurrency

    async def start(self) -> None:
        """Ask the server which model it serves, unless one was named."""
        try:
            answer = await self._client.get("/v1/models")
            answer.raise_for_status()
            served = [entry["id"] for entry in answer.json()["data"]]
        except httpx.HTTPStatusError as error:
            raise EndpointUnusable(
                f"{self.base_url}/v1/models answered {error.response.status_code}; "
                "check the URL and CONSERVE_API_KEY"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL, AttributeError, KeyError, TypeError, ValueError) as error:
            raise EndpointUnusable(
                f"no OpenAI-compatible server answers at {self.base_url} ({error}); "
                "start it or correct --endpoint"
            ) from error
        if self.model is None:
            if not served:
                raise EndpointUnusable(f"{self.base_url} serves no model; name one with --model")
            self.model = served[0]

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        try:
            answer = await self._client.post(
                call.url, json={**call.body, "model": self.model, "stream": False}
            )
        except httpx.ReadTimeout as error:
            raise EndpointFault(f"no answer within {ANSWER_S:.0f} s") from error
        except (httpx.RemoteProtocolError, httpx.ReadError) as error:
            raise EndpointFault(f"the connection broke: {error or type(error).__name__}") from error
        except httpx.HTTPError as error:
            raise EndpointUnavailable(
                f"cannot reach {self.base_url}: {error or type(error).__name__}"
            ) from error
        if answer.status_code != httpx.codes.OK:
            raise refusal(answer)
        try:
            return completion(call.url, answer.json())
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise EndpointFault(f"the answer is no completion: {answer.text[:200]!r}") from error

    async def close(self) -> None:
        await self._client.aclose()
        await asyncio.sleep(0)


def completion(url: Url, answer: Mapping[str, Any]) -> Completion:
    """Read an OpenAI response body; raises whatever a malformed one raises."""
    usage = answer.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    choices = tuple(to_choice(url, choice) for choice in answer["choices"])
    if not choices:
        raise ValueError("no choices")
    return Completion(
        choices=choices,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        cached_tokens=int(details.get("cached_tokens") or 0),
        model=str(answer.get("model", "")),
    )


def to_choice(url: Url, choice: Mapping[str, Any]) -> Choice:
    """One entry of `choices`, of either route."""
    text = choice["message"]["content"] if url is Url.CHAT else choice["text"]
    return Choice(
        text=text or "",
        finish_reason=str(choice.get("finish_reason") or "stop"),
        logprobs=choice.get("logprobs"),
    )


def refusal(answer: httpx.Response) -> EndpointError:
    """The error that a status other than 200 amounts to."""
    message = f"HTTP {answer.status_code}: {error_message(answer)}"
    if answer.status_code in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE):
        return EndpointBusy(message, retry_after_s=retry_after_s(answer))
    if answer.status_code in (httpx.codes.BAD_GATEWAY, httpx.codes.GATEWAY_TIMEOUT):
        return EndpointUnavailable(message)
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return EndpointUnusable(f"{message}; check CONSERVE_API_KEY")
    if answer.status_code == httpx.codes.REQUEST_TIMEOUT or answer.status_code >= 500:
        return EndpointFault(message)
    too_long = any(words in message.lower() for words in TOO_LONG)
    return RequestRejected(message, kind="too_long" if too_long else "invalid_request")


def error_message(answer: httpx.Response) -> str:
    """What the server says went wrong."""
    try:
        body = answer.json()
        inner = body.get("error", body)
        return str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    except (ValueError, AttributeError):
        return answer.text[:200]


def retry_after_s(answer: httpx.Response) -> float | None:
    """The server's own wish, in seconds."""
    try:
        return max(0.0, float(answer.headers["retry-after"]))
    except (KeyError, ValueError):
        return None
