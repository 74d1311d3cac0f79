"""Offline work of a comparison: rows of random tokens, as long as arXiv papers or as given."""

import json
from collections.abc import Iterable, Iterator
from importlib.resources import files
from itertools import repeat
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from conserve.bench.presets import Preset

LENGTHS = "arxiv_summarization_lengths.parquet"


def lengths_of(preset: Preset, seed: int) -> Iterator[tuple[int, int]]:
    """Prompt and answer tokens of a preset's rows."""
    if preset.offline_lengths is not None:
        return repeat(preset.offline_lengths, preset.offline_rows)
    factor, most = preset.offline_factor, preset.offline_longest
    return like_papers(preset.offline_rows, factor=factor, most=most, seed=seed)


def like_papers(count: int, *, factor: float, most: int, seed: int) -> Iterator[tuple[int, int]]:
    """Yield prompt and answer tokens of rows: lengths of arXiv papers and their abstracts, times `factor`.

    A row and its answer have at most `most` tokens together: a prompt is cut for its answer, never the other way
    round. Random tokens give a model no reason to end, so answers are as long as the abstracts that people wrote.
    """
    table = pq.read_table(str(files("conserve.bench") / "data" / LENGTHS))
    chosen = np.random.default_rng(seed).integers(0, table.num_rows, count)
    inputs = (table["input_tokens"].to_numpy()[chosen] * factor).astype(int)
    outputs = (table["output_tokens"].to_numpy()[chosen] * factor).astype(int)
    for prompt, answer in zip(inputs, outputs, strict=True):
        answer_tokens = int(min(max(answer, 1), most - 1))
        yield int(min(max(prompt, 1), most - answer_tokens)), answer_tokens


def rows(lengths: Iterable[tuple[int, int]], *, vocab_range: tuple[int, int], seed: int) -> Iterator[str]:
    """Yield OpenAI batch lines with random token ids, of these prompt and answer lengths."""
    rng = np.random.default_rng(seed)
    for number, (prompt_tokens, answer_tokens) in enumerate(lengths):
        body = {
            "model": "any",
            "prompt": rng.integers(*vocab_range, prompt_tokens).tolist(),
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        line = {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/completions", "body": body}
        yield json.dumps(line)


def write(path: Path, lines: Iterator[str]) -> Path:
    """Write the rows as a file for `conserve submit`."""
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(line + "\n")
    return path
