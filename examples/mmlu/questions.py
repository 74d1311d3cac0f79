"""Questions of mmlu.parquet for lm-eval's tasks."""

from pathlib import Path
from typing import Any

import datasets

FILE = Path(__file__).with_name("mmlu.parquet")


def of(subject: str) -> dict[str, Any]:
    """Questions of one subject by split: `dev` has the five that are shown with their answers."""
    rows = datasets.Dataset.from_parquet(str(FILE)).filter(lambda row: row["subject"] == subject)
    return {split: rows.filter(lambda row, split=split: row["split"] == split) for split in ("dev", "test")}


def geography(**_: object) -> dict[str, Any]:
    return of("high_school_geography")


def marketing(**_: object) -> dict[str, Any]:
    return of("marketing")


def psychology(**_: object) -> dict[str, Any]:
    return of("high_school_psychology")
