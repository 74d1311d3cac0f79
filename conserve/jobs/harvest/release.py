"""The release of a store: leases of harvesters that died end, and those of the others are waited for."""

import time
from collections.abc import Callable
from typing import TypeVar

from conserve.errors import StoreInUse
from conserve.jobs.harvest.expiry import Expiry
from conserve.store.books import leases
from conserve.store.copying.move import named
from conserve.store.database.store import Transaction

T = TypeVar("T")

LOOK_S = 0.5  # between two looks at the leases


class Release:
    """Ends leases whose harvesters died, on this machine at once and on others once they were silent for long."""

    def __init__(self, *, lease_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._expiry = Expiry(lease_s, monotonic)

    def require(self, tx: Transaction) -> None:
        """Raise `StoreInUse` while harvesters hold rows."""
        leases.abandon(tx, leases.dead_owners(tx))
        leases.end_silent(tx, self._expiry.over(leases.signs(tx)))
        if holders := leases.owners(tx):
            raise StoreInUse(
                f"rows are with {named(holders)}",
                step="stop these harvesters and run this again, or add --wait",
            )


def waited(
    attempt: Callable[[], T], say: Callable[[str], None], *, sleep: Callable[[float], None] = time.sleep
) -> T:
    """Try until harvesters hold no rows any more; tells once what it waits for."""
    said = False
    while True:
        try:
            return attempt()
        except StoreInUse as error:
            if not said:
                say(f"waiting: {error.cause}")
            said = True
            sleep(LOOK_S)
