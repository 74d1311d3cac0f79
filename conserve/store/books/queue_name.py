"""Name of a queue in metrics: the beginning of the id of its store, which all processes over it know."""

from conserve.config import Settings
from conserve.store.books.readings import opened

LETTERS = 8
STORE_ID = "select value from meta where key = 'store_id'"


def queue_name(store_id: str) -> str:
    """Name of the queue of the store with this id."""
    return store_id[:LETTERS]


def read_queue_name(settings: Settings) -> str:
    """Name of the queue of a store; empty where there is no store yet."""
    with opened(settings) as query:
        found = query(STORE_ID, {}) if query else []
    return queue_name(str(found[0][0])) if found else ""
