"""Context of a command: the settings and the store."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conserve.cli import output
from conserve.config import Settings, database_elsewhere, load
from conserve.errors import SettingsError
from conserve.variables import GIVEN

if TYPE_CHECKING:
    from conserve.store.database.store import Store


@dataclass(frozen=True, slots=True)
class Context:
    """The program's own flags."""

    home: str | None = None

    def settings(self, **flags: Any) -> Settings:
        """Settings, with these flags on top."""
        return load({"home": self.home, **flags})

    @contextmanager
    def store(self, **flags: Any) -> Iterator["Store"]:
        """Open the store."""
        from conserve.store.database.store import Store

        with closing(Store.open(self.settings(**flags))) as store:
            yield store

    @contextmanager
    def store_to_read(self) -> Iterator["Store"]:
        """Open the store for reading, which works where nothing can be written."""
        from conserve.store.database.store import Store

        with closing(Store.open_to_read(self.settings())) as store:
            yield store

    def require_store(self) -> None:
        """Raise `StoreError` where there is none: a command on all that a store holds would find it well."""
        from conserve.store.database.lineage import require_store

        require_store(self.settings())


def tell_of_database(home: str | None) -> None:
    """Say whose jobs a command is about if `--home` was given and a variable or file names a database."""
    if home is None or GIVEN in os.environ:  # a process of `conserve serve` is given both
        return
    with suppress(SettingsError):  # the command itself tells, if it needs settings
        if (said := database_elsewhere(home, load({"home": home}))) is not None:
            output.say(said)


def split_flags(words: list[str]) -> tuple[list[str], list[str]]:
    """Split a command's own words from vLLM's flags behind them; no job id or model begins with a dash."""
    first_flag = next((n for n, word in enumerate(words) if word.startswith("-")), len(words))
    return words[:first_flag], words[first_flag:]


def job_ids(incomplete: str) -> list[str]:
    """Ids of the jobs that begin like this, for shell completion."""
    import time

    from conserve.errors import ConserveError
    from conserve.store.books.readings import read_jobs

    try:
        jobs = read_jobs(load(), now=time.time())
    except ConserveError:
        return []
    return [job.id for job in reversed(jobs) if job.id.startswith(incomplete)]
