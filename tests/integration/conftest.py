"""Models on disk for the tests that start the real engine, and time for those that do not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conserve.engine.vllm.model.demo_model import demo_model_installed, ensure_demo_model
from conserve.installation import install_line
from tests.tiny_models import FEW_LAYERS, LAYERS, build_tiny_model
from tests.tiny_models import few_words as write_few_words

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


@pytest.fixture(scope="session")
def few_words(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer for models whose text hardly matters."""
    return write_few_words(tmp_path_factory.mktemp("few-words"), tokenizer_from=demo_model)


@pytest.fixture(scope="session")
def few_layers(few_words: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cheapest model that rows leave at the first layer, in the middle and at the last."""
    return build_tiny_model(
        tmp_path_factory.mktemp("few-layers"), tokenizer_from=few_words, layers=FEW_LAYERS
    )


@pytest.fixture
def clock() -> Iterator[Any]:
    """The adapter reads this one."""
    from tests.bare_scheduler import Clock

    clock = Clock()
    with clock.installed():
        yield clock
