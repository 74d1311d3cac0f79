"""The model that a server under test serves."""

import httpx

from conserve.errors import EndpointUnusable


async def served_model(client: httpx.AsyncClient, *, starts: str) -> str:
    """Name of the served model; raises `EndpointUnusable`. `starts` is the command that starts such a server."""
    try:
        answer = (await client.get("/v1/models")).raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise EndpointUnusable(
            f"no OpenAI server answers at {client.base_url} ({error}); start it with: {starts}"
        ) from error
