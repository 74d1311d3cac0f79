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
    import msgspec

    from conserve.server_report import SPILL_PATH, UNREADABLE, SpillReport

    headers = bearer(settings)
    headers[SUPERVISOR] = server.environment[SUPERVISOR]
    blocks = size = 0
    try:
        async with httpx.AsyncClient(timeout=SPILL_S, trust_env=False, headers=headers) as client:
            answer = await client.post(f"{url}{SPILL_PATH}")
        if answer.is_success:
            said = msgspec.json.decode(answer.content, type=SpillReport)
            blocks, size, why = said.blocks_spilled, said.bytes_spilled, said.why_off or said.refused
        else:
            why = answer.json()["error"]["message"]
    except (httpx.HTTPError, KeyError, *UNREADABLE) as error:
        why = f"the server does not say what came of it ({type(error).__name__})"
    if why:
        output.say(f"KV of rows in flight is not kept: {why}")
    elif blocks:
        output.say(f"KV of rows in flight is kept: {output.count(blocks, 'block')}, {size / 1e6:,.0f} MB")
