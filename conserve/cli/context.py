"""Context of a command: the settings and the store."""

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
