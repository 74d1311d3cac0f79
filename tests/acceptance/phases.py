"""Phase of a process's work, written so that a SIGKILL cannot lose it.

A process maps a file of four numbers and changes them as it goes. Each change is a store to memory, which the
kernel keeps whatever becomes of the process. After the kill the harness reads there which phase it hit, and how
many tokens the process had generated.
"""

import functools
import inspect
import mmap
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

from tests.acceptance.rewiring import rewire, wrap


class Phase(IntEnum):
    """Work of a run: that of the store's thread if it has any, else that of the event loop."""

    STARTING = 0  # imports, settings; the store is not open
    RECOVERING = 1  # the store is open; rows of dead processes come back
    CLAIMING = 2  # rows are leased
    LOADING = 3  # their requests are read
    ANSWERING = 4  # rows are in flight and nothing is written
    WAITING = 5  # no row is in flight and none is claimed: others hold them
    SAVING = 6  # tokens of rows in flight are written, or rows put back
    COMMITTING = 7  # results are written
    WRITING = 8  # the journal is read and a shard written
    REGISTERING = 9  # journal rows are swapped for the shard
    ENDING = 10  # leases are given back, files closed, the report made

    @property
    def title(self) -> str:
        """Name of the phase in a table."""
        return TITLES.get(self, self.name.lower())


TITLES = {
    Phase.LOADING: "loading requests",
    Phase.SAVING: "saving tokens",
    Phase.COMMITTING: "committing results",
    Phase.WRITING: "writing a shard",
    Phase.REGISTERING: "registering a shard",
}
AIM = frozenset(Phase) - {Phase.WAITING}
"""The phases that kills must have hit. Waiting is left out: a store with one run on it need never wait."""

LOOP, STORE, IN_FLIGHT, GENERATED = range(4)  # places in the file, 8 bytes each
NUMBERS = 4
IDLE = 255  # the store's thread does nothing


class Trace:
    """The mapped file, for the process that writes it and for the one that reads it.

    Numbers are written by single 8-byte stores, so that a kill leaves the old one or the new one.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), 8 * NUMBERS)).cast("Q")

    @classmethod
    def fresh(cls, path: Path) -> "Trace":
        """Make the file, for a process that has yet to start."""
        path.write_bytes(bytes(8 * NUMBERS))
        trace = cls(path)
        trace[STORE] = IDLE
        return trace

    def __getitem__(self, place: int) -> int:
        return self._numbers[place]

    def __setitem__(self, place: int, number: int) -> None:
        self._numbers[place] = number

    @property
    def phase(self) -> Phase:
        """Phase that the process is in, or was in when it was killed."""
        if self[STORE] != IDLE:
            return Phase(self[STORE])
        phase = Phase(self[LOOP])
        return Phase.WAITING if phase is Phase.ANSWERING and not self[IN_FLIGHT] else phase

    @property
    def started(self) -> bool:
        """True once the process has opened its store."""
        return self[LOOP] != Phase.STARTING

    @property
    def recovered(self) -> bool:
        """True once it has recovered what earlier ones left, and goes on to claim rows."""
        return self[LOOP] not in (Phase.STARTING, Phase.RECOVERING)

    @property
    def generated(self) -> int:
        """Tokens that the fake endpoint has generated in this process."""
        return self[GENERATED]


def writing(_: object, outcomes: Any) -> Phase:
    """The phase of a transaction: a commit if results are in it."""
    return Phase.COMMITTING if outcomes.finished else Phase.SAVING


STORE_WORK: dict[str, Phase | Callable[..., Phase]] = {
    "conserve.jobs.harvest.ledger:Ledger.reopen": Phase.RECOVERING,
    "conserve.jobs.harvest.ledger:Ledger.recover": Phase.RECOVERING,
    "conserve.jobs.harvest.ledger:Ledger.claim": Phase.CLAIMING,
    "conserve.jobs.harvest.workload:Workload.load": Phase.LOADING,
    "conserve.jobs.harvest.recorder:Recorder.write": writing,
    "conserve.store.books.saved_tokens:save_tokens": Phase.SAVING,
    "conserve.store.books.shards:compact_oldest": Phase.WRITING,
    "conserve.store.books.shards:register": Phase.REGISTERING,
}
"""Functions that run in the store's thread, and the phase that lasts from their entry to their exit."""


def follow(trace: Trace) -> None:
    """Have this process write where it is. After all shots are aimed, so that a shot finds the phase written."""
    for at, phase in STORE_WORK.items():
        rewire(at, functools.partial(within, trace, phase))
    wrap("conserve.store.database.store:Store.open", after=lambda: enter(trace, Phase.RECOVERING))
    wrap(
        "conserve.jobs.harvest.harvester:Harvester._until_drained",
        before=lambda: enter(trace, Phase.ANSWERING),
    )
    wrap("conserve.jobs.harvest.harvester:Harvester._end_session", before=lambda: enter(trace, Phase.ENDING))
    rewire("conserve.endpoints.fake:FakeEndpoint.complete", functools.partial(counting, trace))


def enter(trace: Trace, phase: Phase) -> None:
    """The event loop begins a phase, which lasts until the next."""
    trace[LOOP] = phase


def within(
    trace: Trace, phase: Phase | Callable[..., Phase], function: Callable[..., Any]
) -> Callable[..., Any]:
    """The function, its phase written at entry and the one around it at exit."""

    @functools.wraps(function)
    def calling(*arguments: Any, **named: Any) -> Any:
        around = trace[STORE]
        trace[STORE] = phase if isinstance(phase, Phase) else phase(*arguments, **named)
        try:
            return function(*arguments, **named)
        finally:
            trace[STORE] = around

    return calling


def counting(trace: Trace, complete: Callable[..., Any]) -> Callable[..., Any]:
    """The fake endpoint's `complete`, its rows in flight and its tokens counted as they are generated."""
    assert inspect.iscoroutinefunction(complete)

    @functools.wraps(complete)
    async def calling(endpoint: Any, call: Any, on_tokens: Any = None) -> Any:
        one_by_one = 0

        def generated(token_ids: Any) -> None:
            nonlocal one_by_one
            one_by_one += 1
            trace[GENERATED] += 1
            if on_tokens is not None:
                on_tokens(token_ids)

        trace[IN_FLIGHT] += 1
        try:
            completion = await complete(endpoint, call, generated)
            trace[GENERATED] += completion.completion_tokens - len(call.resume_from) - one_by_one
            return completion
        finally:
            trace[IN_FLIGHT] -= 1

    return calling
