"""Moves of the store to another database, noticed by an API that runs."""

import logging
from collections.abc import Callable

from conserve.errors import StoreMoved
from conserve.store.database import guard
from conserve.store.database.store import Store

log = logging.getLogger(__name__)


class MoveWatch:
    """Watch over the store's place; `moved` says why the store is not in this database, None while it is."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.moved: StoreMoved | None = None
        self.on_gone: Callable[[], object] = lambda: None

    def look(self) -> StoreMoved | None:
        """Look at the mark of a move; calls `on_gone` once the store is in another database for good."""
        before, self.moved = self.moved, self._moved()
        if self.moved is not None and str(self.moved) != str(before):
            log.warning("%s", self.moved)
            if self.moved.for_good:
                self.on_gone()
        return self.moved

    def _moved(self) -> StoreMoved | None:
        try:
            with self._store.read() as tx:
                guard.require_here(tx)
        except StoreMoved as error:
            return error
        return None
