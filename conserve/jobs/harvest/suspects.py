"""Turns of suspects: rows that run alone get some of the time while other rows are left."""

from collections.abc import Callable, Collection

from conserve.store.books import suspects
from conserve.store.database.store import Store

LOOK_S = 60.0  # between two looks for suspects of other harvesters
TURN_S = 30.0  # from the moment at which no other row is in flight
WAIT_S = 300.0  # until the first turn, and between two, of suspects whose job goes first no more than others
AHEAD, BESIDE = 1.0, 9.0
"""Time of other rows to that of a turn, where the suspects' job goes first, and elsewhere."""


class SuspectTurns:
    """Says when a harvester lets the other rows land and runs suspects, one after the other.

    The engine computes one row then, so even the most urgent suspects have half of the time.
    """

    def __init__(
        self,
        store: Store,
        *,
        only: Collection[str] | None,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._store, self._only, self._clock, self._monotonic = store, only, clock, monotonic
        self._look_at = 0.0
        self._ahead: bool | None = None  # their job goes before all others; None: no suspect waits
        self._since = 0.0  # end of the last turn, or the first sight of suspects
        self._took_s = 0.0  # time of the last turn
        self._begun: float | None = None  # no other rows are claimed since then; None between turns
        self._alone_since: float | None = None  # and none is in flight

    @property
    def is_to_look(self) -> bool:
        """True if a look for suspects is due."""
        return self._monotonic() >= self._look_at

    def look_soon(self) -> None:
        """Look for suspects at the next claim: rows of this harvester became suspects."""
        self._look_at = 0.0

    def look(self, model: str | None) -> None:
        """Look for suspects that wait; runs in the store's thread."""
        self._look_at = self._monotonic() + LOOK_S
        with self._store.read() as tx:
            found = suspects.go_ahead(tx, now=self._clock(), only=self._only, model=model)
        if self._ahead is None and not self._took_s:
            self._since = self._monotonic()
        if found is None:
            self.none_left()
            self._took_s = 0.0
        self._ahead = found

    def are_next(self, *, others_fly: bool) -> bool:
        """True if no other row is to be claimed now."""
        if self._ahead is None:
            return False
        now = self._monotonic()
        if self._begun is None:
            if now < self._since + self._wait_s:
                return False
            self._begun = now
        if others_fly:
            return True
        self._alone_since = now if self._alone_since is None else self._alone_since
        if now < self._alone_since + TURN_S:
            return True
        self._end()
        return False

    def none_left(self) -> None:
        """Note that no suspect could be claimed: other rows go on."""
        self._ahead = None
        self._end()

    @property
    def _wait_s(self) -> float:
        """Time of other rows between two turns."""
        return AHEAD * self._took_s if self._ahead else max(WAIT_S, BESIDE * self._took_s)

    def _end(self) -> None:
        if self._begun is not None:
            self._since = self._monotonic()
            self._took_s = self._since - self._begun
        self._begun = self._alone_since = None
