"""Token counts by the server that is to answer, through vLLM's /tokenize."""

from collections.abc import Mapping
from typing import Any, Self

import httpx
import msgspec

from conserve.endpoints.answers import UNREADABLE
from conserve.endpoints.discovery import sole_model
from conserve.endpoints.exchange import open_client, short_response
from conserve.hosts import server_root, split_login

ANSWER_S = 60.0
FIELDS = ("messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt",
          "continue_final_message", "add_special_tokens")  # fmt: skip
"""Fields of a chat that its prompt depends on."""
NO_ANSWER = (httpx.HTTPError, *UNREADABLE, AttributeError, KeyError, TypeError)
"""Raised where a server is away, or says nothing of use."""


class ServerTokens:
    """Asks a server for the lengths of prompts; `context` is its model's context length, None if unknown."""

    def __init__(self, client: httpx.AsyncClient, model: str, context: int | None) -> None:
        self._client = client
        self.model, self.context = model, context

    @classmethod
    async def ask(
        cls,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> Self:
        """Find out the server's model; raises `EndpointUnusable` if none answers, and as `open_client` does."""
        shown, login = split_login(base_url)
        url = server_root(shown)
        client = open_client(url, api_key, transport, login=login, silent_s=ANSWER_S)
        try:
            name = model or await sole_model(client)
            return cls(client, name, await context_of(client, name))
        except BaseException:
            await client.aclose()
            raise

    async def of_text(self, text: str, *, special: bool) -> int | None:
        """Number of tokens in a prompt; None if the server does not count."""
        return await self._count({"prompt": text, "add_special_tokens": special})

    async def of_chat(self, body: Mapping[str, Any]) -> int | None:
        """Number of tokens in a chat by the model's chat template; None if the server does not count."""
        return await self._count({name: body[name] for name in FIELDS if body.get(name) is not None})

    async def _count(self, body: dict[str, Any]) -> int | None:
        try:
            asked = {"model": self.model, **body}
            reply = await short_response(self._client, "POST", "/tokenize", json=asked, seconds=ANSWER_S)
            if reply.status != httpx.codes.OK:
                return None
            told = msgspec.json.decode(reply.content)
            self.context = self.context or int(told.get("max_model_len") or 0) or None
            return int(told["count"])
        except NO_ANSWER:
            return None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


async def context_of(client: httpx.AsyncClient, model: str) -> int | None:
    """Context length of this model in the server's list; None if it is not there."""
    try:
        reply = await short_response(client, "GET", "/v1/models", seconds=ANSWER_S)
        entries = msgspec.json.decode(reply.content)["data"]
        lengths = [entry.get("max_model_len") for entry in entries if entry["id"] == model]
        return int(lengths[0]) if lengths and lengths[0] else None
    except NO_ANSWER:
        return None
