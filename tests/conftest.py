"""Every test gets an environment of its own; the stores and inputs that most of them need."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve.config import Settings, load
from conserve.store.store import Store

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the developer's reaches a test."""
    for name in list(os.environ):
        if name.startswith("CONSERVE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CONSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def settings() -> Settings:
    return load()


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    opened = Store.open(settings)
    yield opened
    opened.close()


WriteInput = Callable[..., Path]


@pytest.fixture
def write_input(tmp_path: Path) -> WriteInput:
    """Writes columns as a Parquet file."""

    def write(name: str = "input.parquet", **columns: Sequence[Any]) -> Path:
        path = tmp_path / name
        pq.write_table(pa.table(dict(columns)), path)
        return path

    return write
