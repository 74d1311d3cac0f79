"""`conserve keys`: keys of the Batch API and of live requests."""

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conserve.cli import output
from conserve.cli.context import Context

if TYPE_CHECKING:
    from conserve.store.books.keys import ApiKey

EXAMPLE = """
conserve keys add nightly --project search --batch --limit-rows 100000
conserve keys list
conserve keys revoke nightly
"""

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key.")]


def add(
    ctx: typer.Context,
    name: Name,
    project: Annotated[
        str, typer.Option(metavar="P", help="Its files and batches are the project's; others see none.")
    ] = "default",
    live: Annotated[
        bool, typer.Option("--live", help="For live requests alone, unless --batch too.")
    ] = False,
    batch: Annotated[
        bool, typer.Option("--batch", help="For files and batches alone, unless --live too.")
    ] = False,
    limit_rows: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Most unfinished rows of its batches.")
    ] = None,
    limit_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Most tokens of its batches of the last 24 hours.")
    ] = None,
) -> None:
    """Make a key and print it, once: the store keeps its hash."""
    from conserve.store.books import keys

    context: Context = ctx.obj
    with context.store() as store, store.write() as tx:
        made = keys.add(
            tx,
            name,
            project=project,
            now=time.time(),
            live=live or not batch,
            batch=batch or not live,
            limit_rows=limit_rows,
            limit_tokens=limit_tokens,
        )
    output.data(made)
    output.say(f"this is the key {name!r} of the project {project!r}; it is not shown again")


def revoke(ctx: typer.Context, name: Name) -> None:
    """End a key for good; its batches go on, and stay with the project."""
    from conserve.store.books import keys

    context: Context = ctx.obj
    with context.store() as store, store.write() as tx:
        keys.revoke(tx, name, now=time.time())
    output.say(f"the key {name!r} is revoked; servers refuse it within a second")


def show(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """List the keys, without the keys themselves."""
    from conserve.store.books import keys

    context: Context = ctx.obj
    with context.store_to_read() as store, store.read() as tx:
        found = keys.everything(tx)
    if as_json:
        output.data_json([document(key) for key in found])
        return
    if not found:
        output.say("there are no keys; make one: conserve keys add NAME")
        return
    rows = [
        [
            key.name,
            key.project,
            uses(key),
            "" if key.limit_rows is None else f"{key.limit_rows:,}",
            "" if key.limit_tokens is None else f"{key.limit_tokens:,}",
            output.moment(key.created_at),
            output.moment(key.revoked_at) if key.revoked_at else "",
        ]
        for key in found
    ]
    header = ("KEY", "PROJECT", "FOR", "ROWS", "TOKENS", "MADE", "REVOKED")
    output.data("\n".join(output.columns(header, rows, right=(3, 4))))


def uses(key: "ApiKey") -> str:
    """Uses of a key in words."""
    return " ".join(name for name, may in (("live", key.live), ("batch", key.batch)) if may)


def document(key: "ApiKey") -> dict[str, Any]:
    """A key as JSON (docs/reference/json.md)."""
    kept = {name: value for name, value in asdict(key).items() if name not in ("seq", "hash")}
    return {**kept, "created_at": output.iso(key.created_at), "revoked_at": output.iso(key.revoked_at)}


VERBS = {"add": add, "list": show, "revoke": revoke}
