"""The lookahead: keeps a window filled with the first rows of each job that were never leased."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, TypeVar

from conserve.endpoints.protocol import KvCache, Url
from conserve.errors import JobNotFound, StoreError
from conserve.jobs.deadlines.slack import SlackOrder
from conserve.jobs.requests.file import RequestFile, StoredRequest
from conserve.jobs.task import Task
from conserve.jobs.window.prefix_tree import Key
from conserve.jobs.window.prompt_key import prompt_key
from conserve.jobs.window.waiting import WaitingRow, WaitingWindow
from conserve.store.books import catalog, choice
from conserve.store.books.shapes import ClaimableJob
from conserve.store.database.store import Store
from conserve.store.files import layout, os_errors

ROWS = 8192  # that a window holds of all jobs together
BLOCKS = 1 << 20  # of their prompts, whichever comes first: long prompts must not hold up the store's thread
MOST_JOBS = 32  # by deadline, then the oldest ones; each has a part of its request file in memory
MOST_DATED = 28  # of them with a deadline, while there are jobs without one
READ_ROWS = 256  # of one job at a time

J = TypeVar("J", bound=ClaimableJob)


class WindowPlace(NamedTuple):
    """Place of a window: the number of rows given out, and the last row that was taken for its prefix."""

    turn: int = 0
    job_id: str = ""
    position: int = 0

    def to_text(self) -> str:
        """Encode the place for the store."""
        return f"{self.turn} {self.job_id} {self.position}" if self.job_id else f"{self.turn}"

    @classmethod
    def from_text(cls, text: str | None) -> "WindowPlace":
        """Inverse of `to_text`; a text that is no place gives the place where every window begins."""
        with suppress(ValueError):
            match (text or "0").split():
                case [turn, job_id, position]:
                    return cls(int(turn), job_id, int(position))
                case [turn]:
                    return cls(int(turn))
        return cls()


class Feed:
    """Rows of one job that were never leased, in order, with their keys; unless `whole`, only rows passed over."""

    def __init__(self, store: Store, job: catalog.JobRecord, cache: KvCache, *, whole: bool) -> None:
        self.whole = whole
        self._store, self._job_id, self._cache = store, job.id, cache
        self._task = Task.from_json(job.task)
        self._requests = RequestFile(layout.requests_file(store.data, job.id))
        self._start = 0  # the next row's position is this or larger
        self._ended = False
        self._read: deque[tuple[int, Key]] = deque()

    def next(self) -> tuple[int, Key] | None:
        """The next row's position and key; None after the last."""
        if not self._read and not self._ended:
            with self._store.read() as tx:
                find = choice.never_leased if self.whole else choice.passed_over
                positions = find(tx, self._job_id, start=self._start, limit=READ_ROWS)
            for position, request in zip(positions, self._requests.read(positions), strict=True):
                self._read.append((position, key_of(request, self._task, self._cache)))
                self._start = position + 1
            self._ended = not positions
        return self._read.popleft() if self._read else None

    def close(self) -> None:
        """Close the request file."""
        self._requests.close()


def held(jobs: Sequence[J], order: SlackOrder) -> list[J]:
    """Jobs that the window holds rows of: by deadline, with places for jobs without one."""
    by_seq = {job.seq: job for job in jobs}
    dated = [by_seq.pop(seq) for seq in order.urgent if seq in by_seq]
    undated = list(by_seq.values())
    dated = dated[: max(MOST_DATED, MOST_JOBS - len(undated))]
    return [*dated, *undated[: MOST_JOBS - len(dated)]]


def key_of(request: StoredRequest, task: Task, cache: KvCache) -> Key:
    """Key of a row's prompt; empty for a row without a prompt, which shares nothing."""
    if request.payload is None:
        return ()
    return prompt_key(Url(request.url or task.url), task.body(request.payload), cache)


class Lookahead:
    """Chooses among the rows of several jobs. Its window follows from the store and its place alone."""

    def __init__(
        self, store: Store, *, utility: float, cache: KvCache, rows: int | None = None, seed: int = 0
    ) -> None:
        self._store, self._cache, self._rows = store, cache, rows or ROWS
        with store.read() as tx:
            place = WindowPlace.from_text(choice.remembered(tx))
        self._window = WaitingWindow(utility, seed=seed, turn=place.turn, cursor=self._key_at(place))
        self._cursor = place
        self._feeds: dict[int, Feed] = {}
        self._ids: dict[int, str] = {}
        self._share = self._rows

    @property
    def place(self) -> str:
        """Place of the window, encoded for the store."""
        return self._cursor._replace(turn=self._window.turn).to_text()

    def follow(
        self,
        jobs: Sequence[ClaimableJob],
        refused: Callable[[str], bool],
        order: SlackOrder | None = None,
    ) -> None:
        """Choose among these jobs from now on; `refused` returns True for a new job that must not run.

        Of a job that is left alone only the rows passed over are chosen; after them it goes on in its own order.
        """
        order = order or SlackOrder()
        jobs = held(jobs, order)
        wanted, whole = {job.seq for job in jobs}, len(jobs) > 1
        for seq in [seq for seq, feed in self._feeds.items() if seq not in wanted or feed.whole != whole]:
            self._drop(seq)
        for job in jobs:
            if job.seq not in self._feeds and not refused(job.id):
                self._open(job.id, whole=whole)
        # A queue has thousands of jobs with a deadline; the window looks through those of its order at each row.
        self._window.arrange(replace(order, urgent=tuple(seq for seq in order.urgent if seq in wanted)))
        self._share = max(1, self._rows // max(1, len(self._feeds)))
        with os_errors.explained(self._store.data):
            for seq in self._feeds:
                self._fill(seq)

    def take(self, limit: int) -> list[tuple[str, int]]:
        """Give out the next rows (job id, position), at most `limit`; the window is refilled after each."""
        taken: list[tuple[str, int]] = []
        with os_errors.explained(self._store.data):
            while len(taken) < limit and len(self._window):
                before = self._window.cursor
                row = self._window.pop()
                job_id = self._ids[row.job]
                if self._window.cursor is not before:
                    self._cursor = WindowPlace(0, job_id, row.position)
                taken.append((job_id, row.position))
                self._fill(row.job)
        return taken

    def forget(self, job_id: str) -> None:
        """Drop the rows of a job of which rows outside the window were leased."""
        for seq in [seq for seq, known in self._ids.items() if known == job_id]:
            self._drop(seq)

    def close(self) -> None:
        """Close all request files."""
        for seq in list(self._feeds):
            self._drop(seq)

    def _open(self, job_id: str, *, whole: bool) -> None:
        with self._store.read() as tx:
            job = catalog.get(tx, job_id)
        self._feeds[job.seq] = Feed(self._store, job, self._cache, whole=whole)
        self._ids[job.seq] = job_id

    def _fill(self, seq: int) -> None:
        """Add rows of a job until it has its share of the window."""
        window, blocks = self._window, BLOCKS // len(self._feeds)
        while window.waiting(seq) < self._share and window.blocks(seq) < blocks:
            read = self._feeds[seq].next()
            if read is None:
                return
            position, key = read
            window.insert(WaitingRow(seq, position), key)

    def _drop(self, seq: int) -> None:
        self._window.discard_job(seq)
        self._feeds.pop(seq).close()
        del self._ids[seq]

    def _key_at(self, place: WindowPlace) -> Key:
        """Key of the row at this place; empty if the row is gone."""
        if not place.job_id:
            return ()
        with suppress(StoreError, JobNotFound), os_errors.explained(self._store.data):
            with self._store.read() as tx:
                task = Task.from_json(catalog.get(tx, place.job_id).task)
            requests = RequestFile(layout.requests_file(self._store.data, place.job_id))
            try:
                return key_of(requests.read([place.position])[0], task, self._cache)
            finally:
                requests.close()
        return ()
