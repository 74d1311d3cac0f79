"""What every command starts from: the settings and the store."""

import shlex
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conserve.config import Settings, load

if TYPE_CHECKING:
    from conserve.store.database.store import Store


@dataclass(frozen=True, slots=True)
class Context:
    """The program's own flags."""

    home: str | None = None

    def settings(self, **flags: Any) -> Settings:
        """The settings, with these flags on top."""
        return load({"home": self.home, **flags})

    @contextmanager
    def store(self, **flags: Any) -> Iterator["Store"]:
        """The open store."""
        from conserve.store.database.store import Store

        with closing(Store.open(self.settings(**flags))) as store:
            yield store

    @contextmanager
    def store_to_read(self) -> Iterator["Store"]:
        """The store, open for commands that change nothing: they work where nothing can be written."""
        from conserve.store.database.store import Store

        with closing(Store.open_to_read(self.settings())) as store:
            yield store


def bearer(settings: Settings) -> dict[str, str]:
    """The header for a server's own routes, with whichever key there is."""
    key = settings.api_key or settings.harvest_key
    return {"Authorization": f"Bearer {key}"} if key else {}


def split_flags(words: list[str]) -> tuple[list[str], list[str]]:
    """What a command was given, and the vLLM flags behind it; no job id or model begins with a dash."""
    first_flag = next((n for n, word in enumerate(words) if word.startswith("-")), len(words))
    return words[:first_flag], words[first_flag:]


def engine_flags(settings: Settings, flags: list[str]) -> list[str]:
    """The embedded engine's flags: those of the settings, then those of the command line."""
    return [*shlex.split(settings.engine_args), *flags]


def job_ids(incomplete: str) -> list[str]:
    """Shell completion of a job's id."""
    import time

    from conserve.errors import ConserveError
    from conserve.store.books.readings import read_jobs

    try:
        jobs = read_jobs(load(), now=time.time())
    except ConserveError:
        return []
    return [job.id for job in reversed(jobs) if job.id.startswith(incomplete)]
