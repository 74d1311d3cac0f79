"""Offline rows of a benchmark's own servers: made, queued in a store of theirs, and their cost."""

import math
import time
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path

from conserve.bench.bound import Mix, most_rows_per_s
from conserve.bench.offline import lengths_of, rows, write
from conserve.bench.playing import VOCABULARY
from conserve.bench.presets import Preset
from conserve.bench.simulate_online import EngineModel
from conserve.bench.sizing import Sized
from conserve.bench.stock import RowsInFlight
from conserve.config import Settings
from conserve.endpoints.protocol import Url
from conserve.jobs.inputs.source import Input
from conserve.jobs.requests.submit import submit
from conserve.jobs.task import Kind, Task
from conserve.profiles.worth import Worth
from conserve.store.books.job_terms import JobTerms
from conserve.store.books.readings import read_jobs
from conserve.store.database.store import Store

FASTER = 2.0  # than its latency model: an engine whose rows still last


@dataclass(slots=True, kw_only=True)
class RowFiles:
    """Files of different offline rows, which the queues of all servers share; each is made when it is asked for."""

    folder: Path
    preset: Preset
    seed: int
    made: list[Path] = field(default_factory=list)

    def nth(self, number: int) -> Path:
        """The file of this number."""
        while len(self.made) <= number:
            seed = self.seed + len(self.made)
            lines = rows(lengths_of(self.preset, seed), vocab_range=VOCABULARY, seed=seed)
            self.made.append(write(self.folder / f"offline-{len(self.made)}.jsonl", lines))
        return self.made[number]


@dataclass(slots=True, kw_only=True)
class OfflineQueue:
    """Offline rows of one server, in a store of its own."""

    settings: Settings
    files: RowFiles
    queued: int = 0  # files

    def waiting(self) -> int:
        """Rows that no harvester has taken yet."""
        return sum(job.waiting for job in read_jobs(self.settings, now=time.time()))

    def taken(self) -> bool:
        """True once a harvester has taken a row."""
        return any(job.waiting < job.rows for job in read_jobs(self.settings, now=time.time()))

    def add(self) -> None:
        """Queue the next file."""
        submit_rows(self.settings, self.files.nth(self.queued))
        self.queued += 1


def rows_of_block(sized: Sized, preset: Preset, engine: EngineModel, begins_s: float) -> int:
    """Rows that last for a block on an engine `FASTER` than its model; `begins_s` is the time before the block."""
    mix = Mix.of(list(islice(lengths_of(preset, 0), 1000)), engine)
    block_s = begins_s + sized.takes_s / sized.design.blocks
    in_flight = preset.offline_window or engine.most_rows
    return in_flight + math.ceil(FASTER * engine.engines * most_rows_per_s(engine, mix) * block_s)


def rows_of(preset: Preset, engine: EngineModel | None) -> RowsInFlight:
    """Cost of a preset's rows on this engine."""
    lengths = list(islice(lengths_of(preset, 0), 1000))
    answers = sum(answer for _, answer in lengths)
    contexts = sum(answer * (prompt + answer / 2) for prompt, answer in lengths)
    return RowsInFlight(worth=Worth.by(engine.model) if engine else Worth(), context=contexts / answers)


def new_store(folder: Path) -> Path:
    """Place for the store of a sitting; no earlier one in this folder has used it, or a stock store beside it."""
    places = (folder.absolute() / f"store-{number}" for number in count(1))
    return next(place for place in places if not (place.exists() or [*folder.glob(f"{place.name}-*")]))


def make_rows(settings: Settings, preset: Preset, seed: int) -> OfflineQueue:
    """Queue of offline rows in the benchmark's own store, with the first file in it."""
    settings.home.mkdir(parents=True, exist_ok=True)
    queue = OfflineQueue(settings=settings, files=RowFiles(folder=settings.home, preset=preset, seed=seed))
    queue.add()
    return queue


def submit_rows(settings: Settings, path: Path) -> None:
    """Queue the rows of this file."""
    settings.home.mkdir(parents=True, exist_ok=True)
    store = Store.open(settings)
    try:
        task = Task(kind=Kind.OPENAI, url=Url.COMPLETIONS)
        submit(store, Input(names=[str(path)]), task, JobTerms(name="offline"))
    finally:
        store.close()
