"""Sweeps of a store beside the work of a harvester that stays up."""

import logging
import threading
from collections.abc import Callable

from conserve.errors import StoreError
from conserve.store.database.store import Store
from conserve.store.upkeep import sweep

EVERY_S = sweep.BETWEEN_S + 60.0  # longer than a bucket's sweep was ago, which the same machine began

log = logging.getLogger(__name__)


class Sweeps:
    """Sweeps in a thread of its own: no lease waits for a long listing, and the process ends without it."""

    def __init__(self, store: Store, *, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock
        self._next_at: float | None = None
        self._thread: threading.Thread | None = None

    def look(self, now: float) -> bool:
        """Begin a sweep if the first look or the last sweep is long ago, and return True; `now` is monotonic.

        A sweep that is still at it is waited for.
        """
        if self._next_at is not None and now < self._next_at:
            return False
        first, self._next_at = self._next_at is None, now + EVERY_S
        if not first and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._sweep, name="sweep", daemon=True)
            self._thread.start()
        return not first

    def _sweep(self) -> None:
        try:
            sweep.sweep(self._store, now=self._clock())
        except StoreError as error:
            log.warning("the store is swept in an hour: %s", error)
