"""Models on disk for the tests that start the real engine, and time for those that do not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conserve.engine.vllm.model.demo_model import demo_model_installed, ensure_demo_model
from conserve.installation import install_line
from tests.tiny_models import LAYERS, build_tiny_model

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def demo_cache() -> Path:
    """The folder that holds the converted demo model; made once and kept between runs."""
    if not demo_model_installed():
        pytest.skip(f"the demo model is not installed: {install_line('demo')}")
    cache = REPOSITORY / ".demo" / "models"
    ensure_demo_model(cache)
    return cache


@pytest.fixture(scope="session")
def demo_model(demo_cache: Path) -> Path:
    return ensure_demo_model(demo_cache)


@pytest.fixture(scope="session")
def tiny_llama(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny-llama"), tokenizer_from=demo_model)


@pytest.fixture(scope="session")
def six_layers(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("six-layers"), tokenizer_from=demo_model, layers=LAYERS)


@pytest.fixture
def clock() -> Iterator[Any]:
    """The adapter reads this one."""
    from tests.bare_scheduler import Clock

    clock = Clock()
    with clock.installed():
        yield clock
