"""Ledger of a harvester, as tests make it."""

from collections.abc import Callable

from conserve.jobs.harvest.ledger import Ledger
from conserve.jobs.harvest.observer import Observer
from conserve.jobs.harvest.tally import Tally
from conserve.store.database.store import Store


def stands() -> float:
    """Time of a clock that stands."""
    return 1.0


def ledger_of(
    store: Store,
    tally: Tally | None = None,
    *,
    model: str | None = None,
    share: str | None = None,
    lease_s: float = 60.0,
    clock: Callable[[], float] = stands,
    monotonic: Callable[[], float] = stands,
) -> Ledger:
    """Ledger of a harvester that takes rows of all jobs."""
    ledger = Ledger(
        store,
        tally or Tally(),
        lease_s=lease_s,
        only=None,
        utility=0.9,
        share=share,
        rebind=False,
        clock=clock,
        monotonic=monotonic,
        observer=Observer(),
    )
    ledger.model = model
    return ledger
