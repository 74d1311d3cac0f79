"""Kills around messages to hooks: each is received at least once, under one id, and no change goes untold."""

import os
import signal
from pathlib import Path

import pytest

from conserve.store.books import hooks, outbox
from conserve.store.books.events import Event
from conserve.store.database.store import Store
from tests import commands
from tests.acceptance.aimed import Shot, command
from tests.acceptance.forks import Forks
from tests.commands import conserve
from tests.receiver import receiving

SPOTS = {
    "before the change is durable": Shot(at="conserve.store.books.events:of_jobs", call=1),
    "in the transaction of the change": Shot(at="conserve.store.books.events:of_jobs", call=1, after=True),
    "while the message is held": Shot(at="conserve.jobs.hooks.courier:post"),
    "once the receiver has it": Shot(at="conserve.jobs.hooks.courier:post", after=True),
    "while that is written down": Shot(at="conserve.store.books.outbox:record", after=True),
}


@pytest.mark.parametrize("spot", SPOTS)
def test_an_end_is_told_whatever_is_killed(store: Store, tmp_path: Path, forks: Forks, spot: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"q": "one"}\n{"q": "two"}\n')
    with receiving() as receiver:
        with store.write() as tx:
            hooks.add(tx, receiver.url, events=[Event.COMPLETED], allow_private=True, now=0.0)
        assert conserve("submit", str(rows), "--prompt", "{{ q }}").returncode == 0
        words = command([SPOTS[spot]], "run", "--endpoint", "fake:")
        killed = commands.ended(forks.start(words, env=os.environ, errors=tmp_path / "errors"))
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        conserve("run", "--endpoint", "fake:")
        conserve("hooks", "deliver")
        with store.read() as tx:
            (message,) = outbox.page(tx, limit=9)
    assert message.state == "delivered"
    assert {got.id for got in receiver.got} == {message.id}
    received = 2 if spot in ("once the receiver has it", "while that is written down") else 1
    assert len(receiver.got) == received
