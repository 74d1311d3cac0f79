"""Items of a suite's file read for judging: scores by metric and item, sources, counts."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from conserve.errors import StoreDamaged
from conserve.store.files.os_errors import damage_apart


class ItemKey(NamedTuple):
    """Names one item of a suite in any night."""

    item: str
    epoch: int


@dataclass(slots=True)
class Scored:
    """Scores of a suite's items. Items without a source of their own are a source each; epochs share it."""

    by_metric: dict[str, dict[ItemKey, float]] = field(default_factory=dict)
    sources: dict[ItemKey, str] = field(default_factory=dict)
    items: int = 0
    failed: int = 0
    error: str | None = None  # of the first item that has one
    prompt_tokens: int = 0
    answer_tokens: int = 0


COUNTED = ("item", "epoch", "source", "error", "prompt_tokens", "answer_tokens", "scores")
SHOWN = ("item", "epoch", "prompt", "answer", "expected", "error")


def scores_of(path: Path) -> Scored:
    """Scores in a file of items."""
    found = Scored()
    for row in rows_of(path, COUNTED):
        key = ItemKey(row["item"], row["epoch"])
        found.sources[key] = f"source {row['source']}" if row["source"] is not None else f"item {key.item}"
        found.items += 1
        if row["error"] is not None:
            found.failed += 1
            found.error = found.error or row["error"]
        found.prompt_tokens += row["prompt_tokens"]
        found.answer_tokens += row["answer_tokens"]
        for metric, score in row["scores"]:
            found.by_metric.setdefault(metric, {})[key] = score
    return found


def texts_of(path: Path, wanted: set[ItemKey]) -> Mapping[ItemKey, Mapping[str, Any]]:
    """Prompts and answers of some items."""
    return {key: row for row in rows_of(path, SHOWN) if (key := ItemKey(row["item"], row["epoch"])) in wanted}


def rows_of(path: Path, columns: tuple[str, ...]) -> Any:
    """Yield rows of a file of items; raises `StoreDamaged`, or as `damage_apart` does."""
    try:
        with damage_apart(path), pq.ParquetFile(path) as file:
            for batch in file.iter_batches(4096, columns=list(columns)):
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise StoreDamaged(
            f"the items {path} of the run {path.parent.name} cannot be read ({error}); bring the file back from a "
            f"backup, or remove the run: rm -r {shlex.quote(str(path.parent))}"
        ) from error
