"""Running servers that take the rows of a new job without another command."""

import time
from typing import TYPE_CHECKING

from conserve.config import Settings
from conserve.errors import StoreError
from conserve.jobs.harvest.services import running

if TYPE_CHECKING:
    from conserve.store.database.store import Store

TAKES = ("serving", "busy")  # states of a server whose harvester sends it rows


def taker(settings: Settings, store: "Store", model: str | None) -> str | None:
    """URL of a `conserve serve` over this store whose harvester takes rows of this model; None without one.

    A `conserve harvest` beside no such server does not count: it may be for other jobs alone.
    """
    served = {server.url for server in running(settings)}
    if not served:
        return None
    from conserve.jobs.harvest.notes import of_this_machine
    from conserve.store.books import servers

    shown = {name: url for url in served for name in (url, of_this_machine(url))}
    try:
        with store.read() as tx:
            seen, now = servers.everything(tx), servers.moment(tx, time.time())
    except StoreError:  # the job is queued, whatever else the store does now
        return None
    for server in seen:
        fed = any(one.is_fresh(now) and one.state in TAKES for one in server.feedings)
        if server.url in shown and fed and server.drained_at is None and model in (None, server.model):
            return shown[server.url]
    return None


def what_runs(served_at: str | None) -> str:
    """Clause on what runs queued rows: the server at this URL, or a command that the user has yet to give."""
    if served_at is None:
        return "run them with: conserve run"
    return f"{served_at} takes them; watch with: conserve status --watch"
