"""Threads beside the routes: inputs become jobs, results become files, files expire.

Each looks into the store by itself, so what a killed process left undone is done by the next one.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from conserve.batch_api.moved import MoveWatch
from conserve.errors import ConserveError, StoreError, StoreMoved, one_line
from conserve.jobs.batches.admission import admit, refuse
from conserve.jobs.batches.delivery import deliver
from conserve.jobs.batches.lines import Limits
from conserve.store.books import batches, catalog, uploads
from conserve.store.books.batches import InputFault
from conserve.store.database import guard
from conserve.store.database.store import Store

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks into the store
LONGEST_LOOK_S = 60.0  # while the store is out of reach
CLEAN_S = 3600.0  # between two looks for files that have expired


class StepThread:
    """A thread that does its step at every look, and at once when it is woken."""

    def __init__(self, name: str, step: Callable[[float], None]) -> None:
        self._step = step
        self._woken, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def wake(self) -> None:
        """Look now."""
        self._woken.set()

    def stop(self, within_s: float) -> None:
        """End after the step under way; one that takes longer is cut off with the process."""
        self._over = True
        self._woken.set()
        self._thread.join(within_s)

    def _run(self) -> None:
        pause_s = LOOK_S
        while not self._over:
            self._woken.clear()
            try:
                self._step(time.time())
                pause_s = LOOK_S
            except Exception as error:
                if isinstance(error, ConserveError):
                    log.warning("%s", error)
                else:
                    log.exception("a step of %s failed", self._thread.name)
                pause_s = min(2 * pause_s, LONGEST_LOOK_S)
            self._woken.wait(pause_s)


class Admissions:
    """Inputs become jobs."""

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store, self._limits = store, limits
        self.worker = StepThread("admissions", self.step)
        self.wake = self.worker.wake

    def step(self, now: float) -> None:
        """Admit every batch that waits, unless the store is elsewhere; a fault of this program fails its batch."""
        with self._store.read() as tx:
            waiting = batches.validating(tx) if guard.mark_text(tx) is None else []
        trouble: StoreError | None = None
        for batch_id in waiting:
            try:
                admit(self._store, batch_id, self._limits, now=now)
            except StoreMoved:
                return  # the batches are admitted where the store is, and `MoveWatch` tells of it
            except StoreError as error:
                trouble = error  # of this input perhaps; the batches behind it are not held up
            except Exception as error:
                log.exception("batch %s was not admitted", batch_id)
                why = InputFault(code="server_error", message=f"the input cannot be read: {one_line(error)}")
                refuse(self._store, batch_id, [why], now=now)
        if trouble is not None:
            raise trouble


def expire(store: Store, now: float) -> None:
    """End the jobs whose deadline has passed, also where no harvester runs."""
    with store.read() as tx:
        late = catalog.late(tx, now=now)
    if late:
        with store.write() as tx:
            catalog.expire(tx, now=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Later:
    """Moments at which a batch that was not delivered is tried again."""

    at: float
    pause_s: float


class Deliveries:
    """Results become files, and files that have expired go."""

    def __init__(self, store: Store, moves: MoveWatch | None = None) -> None:
        self._store, self._moves = store, moves or MoveWatch(store)
        self._asked: dict[str, None] = {}
        self._later: dict[str, Later] = {}
        self._cleaned_at = 0.0
        self.worker = StepThread("deliveries", self.step)

    def _deliver(self, batch_id: str, now: float) -> None:
        """Deliver a batch; one that fails is tried again ever more rarely, and holds up no other."""
        try:
            deliver(self._store, batch_id, now=time.time())
            self._asked.pop(batch_id, None)
            self._later.pop(batch_id, None)
            return
        except StoreError as error:
            log.warning("batch %s was not delivered: %s", batch_id, error)
        except Exception:
            log.exception("batch %s was not delivered", batch_id)
        before = self._later.get(batch_id)
        pause_s = min(2 * before.pause_s, LONGEST_LOOK_S) if before else 2 * LOOK_S
        self._later[batch_id] = Later(at=now + pause_s, pause_s=pause_s)

    def ask(self, batch_id: str) -> None:
        """Have a batch's files written that no client has asked for before."""
        self._asked[batch_id] = None
        self.worker.wake()

    def step(self, now: float) -> None:
        """Deliver every batch whose job has ended; nothing while the store is in another database."""
        if self._moves.look() is not None:
            return
        asked = list(self._asked)
        expire(self._store, now)
        with self._store.read() as tx:
            ready = batches.deliverable(tx, asked=asked, now=now)
            rest = batches.several(tx, set(asked).difference(ready))
        waiting = {batch.id for batch in rest if batch.unfinished}
        for batch_id in set(asked).difference(ready, waiting):
            self._asked.pop(batch_id, None)
        self._later = {batch_id: later for batch_id, later in self._later.items() if batch_id in ready}
        for batch_id in ready:
            if batch_id not in self._later or self._later[batch_id].at <= now:
                self._deliver(batch_id, now)
        if abs(now - self._cleaned_at) >= CLEAN_S:
            self._cleaned_at = now
            uploads.remove_expired(self._store, now=now)
            uploads.sweep_uploads(self._store, now=now)
