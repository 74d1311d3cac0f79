"""`conserve hooks`: addresses that are told of changes of batches, signed by Standard Webhooks."""

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conserve.cli import exits, output
from conserve.cli.context import Context
from conserve.errors import UsageError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from conserve.store.books.events import Event
    from conserve.store.books.hooks import Hook
    from conserve.store.books.outbox import MessageRecord
    from conserve.store.database.store import Transaction

EXAMPLE = """
conserve hooks add https://example.com/batches --events completed,failed,expired
conserve hooks test hook_1f2e3d4c
conserve hooks log --state given_up
"""

HookId = Annotated[str, typer.Argument(metavar="HOOK", help="Id of the hook, as hooks list shows it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON array.")]
DELIVER_S = 300.0


def add(
    ctx: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="Where messages are sent, by POST.")],
    events: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="States to be told of, or all (completed,failed,expired,cancelled by default).",
        ),
    ] = None,
    project: Annotated[
        str | None, typer.Option(metavar="P", help="Only of this project's batches; of all by default.")
    ] = None,
    allow_private: Annotated[
        bool,
        typer.Option("--allow-private", help="The receiver may be in your own network, and may speak http."),
    ] = False,
) -> None:
    """Add a hook and print its secret, once: receivers check the messages' signatures with it."""
    from conserve.jobs.hooks.addresses import checked_url
    from conserve.store.books import hooks

    context: Context = ctx.obj
    wanted = events_of(events)
    checked = checked_url(url, private=allow_private)
    with context.store() as store, store.write() as tx:
        made = hooks.add(
            tx, checked, events=wanted, project=project, allow_private=allow_private, now=time.time()
        )
    output.data(made.secret)
    output.say(
        f"this is the secret of {made.id}; it is not shown again. Try it: conserve hooks test {made.id}"
    )


def events_of(text: str | None) -> "tuple[Event, ...]":
    """Events that the flag names."""
    from conserve.store.books.events import ENDS, Event

    if text is None:
        return ENDS
    names = [name.strip() for name in text.split(",")]
    if names == ["all"]:
        return tuple(Event)
    for name in names:
        if name not in tuple(Event):
            known = ", ".join(Event)
            raise UsageError(f"there is no event {one_line(name, most=40)!r}; there are {known}, or all")
    return tuple(event for event in Event if event in names)


def show(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the hooks, without their secrets."""
    from conserve.store.books import hooks, outbox

    context: Context = ctx.obj
    with context.store_to_read() as store, store.read() as tx:
        found, counts = hooks.everything(tx), outbox.counts(tx)
    if as_json:
        output.data_json([document(hook, counts.get(hook.id, {})) for hook in found])
        return
    if not found:
        output.say("there are no hooks; make one: conserve hooks add URL")
        return
    header = ("HOOK", "URL", "EVENTS", "PROJECT", "DELIVERED", "WAITING", "GIVEN UP", "STATE")
    rows = [row_of(hook, counts.get(hook.id, {})) for hook in found]
    output.data("\n".join(output.columns(header, rows, right=(4, 5, 6))))


def row_of(hook: "Hook", counts: dict[str, int]) -> list[str]:
    """A line of the list."""
    numbers = [f"{counts.get(state, 0):,}" for state in ("delivered", "waiting", "given_up")]
    return [hook.id, hook.url, ",".join(hook.events), hook.project or "all", *numbers, hook.ended or "active"]


def document(hook: "Hook", counts: dict[str, int]) -> dict[str, Any]:
    """A hook as JSON (docs/reference/json.md)."""
    kept = {name: value for name, value in asdict(hook).items() if name not in ("seq", "secret")}
    moments = {name: output.iso(kept[name]) for name in ("created_at", "ended_at")}
    return {**kept, **moments, "messages": counts}


def remove(ctx: typer.Context, hook: HookId) -> None:
    """End a hook for good; messages that wait are dropped."""
    from conserve.store.books import hooks

    context: Context = ctx.obj
    with context.store() as store, store.write() as tx:
        dropped = hooks.end(tx, hook, hooks.REMOVED, now=time.time())
    left = f"; {output.count(dropped, 'message')} that waited dropped" if dropped else ""
    output.say(f"{hook} is removed{left}")


def log(
    ctx: typer.Context,
    hook: Annotated[str | None, typer.Argument(metavar="[HOOK]", help="Only of this hook.")] = None,
    state: Annotated[
        str | None, typer.Option(metavar="STATE", help="waiting, delivered, given_up or dropped.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="Most messages.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List the messages to hooks, the newest first, with what came of the last attempt."""
    from conserve.store.books import hooks, outbox
    from conserve.store.books.outbox import MessageState

    context: Context = ctx.obj
    if state is not None and state not in tuple(MessageState):
        raise UsageError(f"--state is one of {', '.join(MessageState)}, not {one_line(state, most=40)!r}")
    wanted = MessageState(state) if state is not None else None
    with context.store_to_read() as store, store.read() as tx:
        if hook is not None:
            hooks.get(tx, hook)
        found = outbox.page(tx, hook_id=hook, state=wanted, limit=limit)
    if as_json:
        output.data_json([message_document(message) for message in found])
        return
    if not found:
        output.say("there are no messages; they are kept for 30 days")
        return
    header = ("MESSAGE", "MADE", "EVENT", "BATCH", "HOOK", "STATE", "ATTEMPTS", "LAST", "NEXT")
    output.data("\n".join(output.columns(header, [message_row(message) for message in found], right=(6,))))


def message_row(message: "MessageRecord") -> list[str]:
    """A line of the log."""
    return [
        message.id,
        output.moment(message.created_at),
        message.event,
        message.batch_id or "",
        message.hook_id,
        message.state.value,
        str(message.attempts),
        message.error or ("" if message.status is None else str(message.status)),
        output.moment(message.next_at) if message.state == "waiting" else "",
    ]


def message_document(message: "MessageRecord") -> dict[str, Any]:
    """A message as JSON (docs/reference/json.md)."""
    hidden = ("seq", "owner", "held_until", "body")
    kept = {name: value for name, value in asdict(message).items() if name not in hidden}
    moments = {name: output.iso(kept[name]) for name in ("created_at", "next_at", "tried_at")}
    return {**kept, **moments}


def test(ctx: typer.Context, hook: HookId) -> None:
    """Send a hook a message of the type conserve.test now; exit code 1 unless its receiver takes it."""
    from conserve.store.books import hooks, outbox

    send_now(ctx, lambda tx, owner, now: outbox.add_test(tx, hooks.active(tx, hook), owner=owner, now=now))


def resend(
    ctx: typer.Context,
    message: Annotated[str, typer.Argument(metavar="MESSAGE", help="Its id, as hooks log shows it.")],
) -> None:
    """Send a message again now, under the same id; exit code 1 unless its receiver takes it."""
    from conserve.store.books import outbox

    send_now(ctx, lambda tx, owner, now: outbox.again(tx, message, owner=owner, now=now))


def send_now(ctx: typer.Context, held: "Callable[[Transaction, str, float], MessageRecord]") -> None:
    """Send the message that `held` gives, and say what came of it."""
    from conserve.jobs.hooks.courier import Courier
    from conserve.store.books import outbox

    context: Context = ctx.obj
    with context.store() as store:
        courier = Courier(store)
        with store.write() as tx:
            mine = held(tx, courier.owner, time.time())
        courier.send(mine)
        with store.read() as tx:
            sent = outbox.get(tx, mine.id)
    if sent.error is None:
        output.say(f"{sent.id}: delivered; the receiver answered {sent.status}")
        return
    later = f"; it is tried again {output.moment(sent.next_at)}" if sent.state == "waiting" else ""
    output.say(f"{sent.id}: not delivered: {sent.error}{later}")
    raise typer.Exit(exits.FAILED)


def deliver(ctx: typer.Context) -> None:
    """Send what is due now, where no conserve api, run or harvest is there to do it."""
    from conserve.jobs.hooks.courier import Courier

    context: Context = ctx.obj
    with context.store() as store:
        courier = Courier(store)
        courier.finish(DELIVER_S)
        courier.stop()
    output.say(
        f"{output.count(courier.delivered, 'message')} delivered, {courier.failed:,} not; run: conserve hooks log"
    )


VERBS = {
    "add": add,
    "list": show,
    "remove": remove,
    "log": log,
    "test": test,
    "resend": resend,
    "deliver": deliver,
}
