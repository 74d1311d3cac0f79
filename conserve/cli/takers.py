"""Running servers and harvesters that take the rows of a new job without another command."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conserve.config import Settings
from conserve.errors import StoreError
from conserve.jobs.harvest.services import running

if TYPE_CHECKING:
    from conserve.store.database.store import Store

TAKES = ("serving", "busy")  # states of a server whose harvester sends it rows


@dataclass(frozen=True, slots=True)
class Taker:
    """A server at this URL that gets rows: of `conserve serve`, or of a `conserve harvest` beside another one."""

    url: str
    is_own: bool
    """True for `conserve serve`, whose harvester takes all jobs; another may be for named jobs alone."""


def taker(settings: Settings, store: "Store", model: str | None) -> Taker | None:
    """The server over this store that gets rows of this model, `conserve serve` before others; None without one."""
    from conserve.jobs.harvest.notes import of_this_machine
    from conserve.store.books import servers

    served = {server.url for server in running(settings)}
    shown = {name: url for url in served for name in (url, of_this_machine(url))}
    try:
        with store.read() as tx:
            seen, now = servers.everything(tx), servers.moment(tx, time.time())
    except StoreError:  # the job is queued, whatever else the store does now
        return None
    fed = [
        server.url
        for server in seen
        if server.drained_at is None
        and model in (None, server.model)
        and any(one.is_fresh(now) and one.state in TAKES for one in server.feedings)
    ]
    own = next((shown[url] for url in fed if url in shown), None)
    if own is not None:
        return Taker(own, is_own=True)
    return Taker(fed[0], is_own=False) if fed else None


def what_runs(found: Taker | None) -> str:
    """Clause on what runs queued rows: a server that gets them, or a command that the user has yet to give."""
    if found is None:
        return "run them with: conserve run"
    takes = f"{found.url} takes them"
    if not found.is_own:
        takes = f"the harvester of {found.url} takes them, unless it is for named jobs alone"
    return f"{takes}; watch with: conserve status --watch"
