"""The KV of rows in flight at a clean stop of `conserve serve`: the supervisor alone may have it written."""

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from conserve.api.servers import bearer
from conserve.cli import output
from conserve.config import Settings
from conserve.variables import SUPERVISOR

if TYPE_CHECKING:
    from conserve.engine.service import ProcessCommand

SPILL_S = 60.0  # limit for writing the KV of rows in flight


def supervised(server: "ProcessCommand") -> "ProcessCommand":
    """The server with a key by which this process alone may have it save the KV of its rows."""
    return replace(server, environment={**server.environment, SUPERVISOR: secrets.token_hex(16)})


async def spill(settings: Settings, server: "ProcessCommand", url: str) -> None:
    """Have the server write the KV of rows in flight to disk before they are withdrawn, and print the result."""
    import httpx

    headers = bearer(settings)
    headers[SUPERVISOR] = server.environment[SUPERVISOR]
    try:
        async with httpx.AsyncClient(timeout=SPILL_S, trust_env=False, headers=headers) as client:
            said = (await client.post(f"{url}/v1/conserve/spill")).json()
        blocks, size = said.get("blocks_spilled", 0), said.get("bytes_spilled", 0)
        why = said["error"]["message"] if "error" in said else said["why_off"] or said["refused"]
    except (httpx.HTTPError, KeyError, ValueError) as error:
        why = f"the server does not say what came of it ({type(error).__name__})"
    if why:
        output.say(f"KV of rows in flight is not kept: {why}")
    elif blocks:
        output.say(f"KV of rows in flight is kept: {output.count(blocks, 'block')}, {size / 1e6:,.0f} MB")
