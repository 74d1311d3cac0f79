"""Offline rows of a benchmark's own servers: made, queued in a store of theirs, and their cost."""

from itertools import islice
from pathlib import Path

from conserve.bench.forecast import EngineModel
from conserve.bench.offline import lengths_of, rows, write
from conserve.bench.playing import VOCABULARY
from conserve.bench.presets import Preset
from conserve.bench.stock import RowsInFlight
from conserve.config import Settings
from conserve.endpoints.protocol import Url
from conserve.jobs.requests.submit import submit
from conserve.jobs.task import Kind, Task
from conserve.profiles.worth import Worth
from conserve.store.database.store import Store


def rows_of(preset: Preset, engine: EngineModel | None) -> RowsInFlight:
    """Cost of a preset's rows on this engine."""
    lengths = list(islice(lengths_of(preset, 0), 1000))
    answers = sum(answer for _, answer in lengths)
    contexts = sum(answer * (prompt + answer / 2) for prompt, answer in lengths)
    return RowsInFlight(worth=Worth.by(engine.model) if engine else Worth(), context=contexts / answers)


def make_rows(settings: Settings, preset: Preset, seed: int) -> Path:
    """Write the offline rows, and queue them in the benchmark's own store; returns their file."""
    settings.home.mkdir(parents=True, exist_ok=True)
    lines = rows(lengths_of(preset, seed), vocab_range=VOCABULARY, seed=seed)
    path = write(settings.home / "offline.jsonl", lines)
    submit_rows(settings, path)
    return path


def submit_rows(settings: Settings, path: Path) -> None:
    """Queue the rows of this file."""
    settings.home.mkdir(parents=True, exist_ok=True)
    store = Store.open(settings)
    try:
        submit(store, str(path), Task(kind=Kind.OPENAI, url=Url.COMPLETIONS), name="offline")
    finally:
        store.close()
