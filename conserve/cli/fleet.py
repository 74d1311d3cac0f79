"""`conserve fleet`: the servers that harvesters feed, and which of them get no rows."""

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from conserve.cli import exits, output
from conserve.cli.context import Context
from conserve.cli.fleet_report import Sight, document, lines, sights, unfed, well
from conserve.errors import ServiceFailed, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from conserve.store.database.store import Store, Transaction

EXAMPLE = """
conserve fleet
conserve fleet drain gpu-3 --wait
conserve fleet undrain gpu-3
"""
EXAMPLES = {
    "list": "conserve fleet list --json",
    "drain": "conserve fleet drain gpu-3 --wait",
    "undrain": "conserve fleet undrain gpu-3",
}
LOOK_S = 0.25  # between two looks for rows in flight

Host = Annotated[
    str, typer.Argument(metavar="HOST", help="Host of servers, host:port or URL of one, as in the list.")
]


def show(
    ctx: typer.Context,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Exit 1 if a server is down, silent or suspected, or breaks its SLO; or if none is fed.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """List the servers that harvesters feed: how each is, what it harvests, and whether its live SLO is kept."""
    from conserve.store.books import queue

    context: Context = ctx.obj
    settings = context.settings()
    with context.store_to_read() as store:
        with store.read() as tx:
            waiting = queue.rows_left(tx, None)
        found = sights(read_sights(store), settings)
    if as_json:
        output.data_json([document(one) for one in found])
    elif not found:
        output.say("no harvester has seen a server yet; run: conserve harvest --endpoint URL")
    else:
        output.data("\n".join(lines(found)))
    starved = bool(found) and waiting > 0 and unfed(found)
    if starved:
        rows = output.count(waiting, "row")
        output.say(f"no harvester feeds a server, and {rows} wait; run: conserve harvest --endpoint URL")
    if check and (starved or not found or not all(well(one, rows_wait=waiting > 0) for one in found)):
        raise typer.Exit(exits.FAILED)


def drain(
    ctx: typer.Context,
    host: Host,
    wait: Annotated[bool, typer.Option("--wait", help="Return once no row is in flight there.")] = False,
    within_s: Annotated[
        float, typer.Option("--within-s", metavar="S", min=1, help="Longest wait, then exit 1.")
    ] = 60.0,
) -> None:
    """Give a server no more rows: those in flight end or go elsewhere. Live requests are not touched."""
    context: Context = ctx.obj
    with context.store() as store:
        urls = under_both_names(store, host, drained_now)
        for url in urls:
            output.say(f"{url} is drained: its rows end or go elsewhere within seconds")
        if wait:
            until_empty(store, urls, within_s)


def undrain(ctx: typer.Context, host: Host) -> None:
    """Give a server rows again."""
    from conserve.store.books import servers

    context: Context = ctx.obj
    with context.store() as store:
        urls = under_both_names(store, host, servers.undrain)
    for url in urls:
        output.say(f"{url} gets rows again")


def drained_now(tx: "Transaction", host: str) -> list[str]:
    """Drain the servers of this name; returns their URLs."""
    from conserve.store.books import servers

    return servers.drain(tx, host, now=servers.moment(tx, time.time()))


def under_both_names(
    store: "Store", host: str, change: "Callable[[Transaction, str], list[str]]"
) -> list[str]:
    """Change the servers of this name, and those that are known by this machine's name too; returns their URLs.

    A store that moved to a database which machines share has a server at a loopback address under both.
    """
    from conserve.jobs.harvest.notes import of_this_machine

    with store.write() as tx:
        urls = change(tx, host)
    for other in sorted({of_this_machine(url) for url in urls} - {*urls}):
        with suppress(UsageError), store.write() as tx:  # it has one name
            urls += change(tx, other)
    return urls


def read_sights(store: "Store") -> list[Sight]:
    """Servers in the store, all of them."""
    from conserve.store.books import servers

    with store.read() as tx:
        now = servers.moment(tx, time.time())
        return [Sight(server=server, now=now) for server in servers.everything(tx)]


def until_empty(store: "Store", urls: list[str], within_s: float) -> None:
    """Wait until every harvester says that no row is at these servers; raises `ServiceFailed` after this time."""
    until = time.monotonic() + within_s
    while True:
        found = [sight for sight in read_sights(store) if sight.server.url in urls]
        left = {sight.server.url: sight.rows_left for sight in found}
        if not any(left.values()):
            unheard = ", ".join(sight.server.url for sight in found if sight.is_unheard)
            if unheard:
                output.say(f"no harvester has told of {unheard} for half a minute; if one runs, see its log")
            else:
                output.say("no row is in flight there")
            return
        if time.monotonic() >= until:
            said = ", ".join(f"{url} has {rows or 'some'}" for url, rows in left.items() if rows)
            raise ServiceFailed(
                f"rows are still in flight after {within_s:g} s ({said}); wait on, or stop it anyway"
            )
        time.sleep(LOOK_S)


VERBS = {"list": show, "drain": drain, "undrain": undrain}
DEFAULT_VERB = "list"
