"""Images of rows and of live requests on vLLM's real scheduler: the time of encoders counts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.warned import OF_VLLM

pytestmark = [*OF_VLLM, pytest.mark.engine]

SIZE = 100  # embeddings of an image, and as many tokens
EMBEDDING_MS = 0.5
TEXT = 20  # tokens before an image, and behind it
Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path, clock: Any) -> Make:
    """Engines whose encoders take `EMBEDDING_MS` for each embedding, under these promises."""

    def make(**slo: Any) -> Any:
        from tests.bare_scheduler import BareEngine, engine_config, let_see

        section = {"policy": "conserve", "preemption": "off", **slo}
        engine = BareEngine(engine_config(tmp_path, section=section, block_size=16), clock=clock)
        let_see(engine, 2048, EMBEDDING_MS)
        return engine

    return make


def with_image(
    engine: Any, name: str, size: int = SIZE, *, text: int = TEXT, answer: int = 3, offline: bool = True
) -> Any:
    """A request with so many tokens before its image, and `TEXT` behind it."""
    from tests.bare_scheduler import show

    request = engine.request(text + size + TEXT, answer, offline=offline)
    show(request, {text: name}, size)
    engine.scheduler.add_request(request)
    return request


def took_ms(engine: Any) -> float:
    """Time of the next iteration."""
    began = engine.clock.now
    engine.step()
    return float(engine.clock.now - began) * 1e3


def encoded(engine: Any) -> int:
    """Images of the last iteration."""
    return len(engine.scheduler.last_iteration.encodes)


def taught(engine: Any) -> Any:
    """The engine after its first image, which no time was known for."""
    with_image(engine, "first", answer=1)
    while engine.scheduler.requests:
        engine.step()
    return engine


def test_images_of_rows_are_encoded_in_the_time_that_a_promise_leaves(make: Make) -> None:
    engine = taught(make(tbt_slo_ms=100, ttft_slo_ms=5000))
    engine.add(100, 150)
    engine.step()
    for number in range(60):
        with_image(engine, f"image-{number}")
    longest_ms, images = 0.0, 0
    for _ in range(140):
        longest_ms = max(longest_ms, took_ms(engine))
        images += encoded(engine)
    assert 80 < longest_ms <= 100 * (1 + 1e-6)
    assert images == 60


def test_rows_pass_others_whose_image_finds_no_time(make: Make) -> None:
    """A harm of 10 % leaves 1.5 ms of an iteration of 15, and an image takes 50."""
    engine = taught(make(harm=0.1))
    live = engine.add(100, 200)
    engine.step()
    alone_ms = took_ms(engine)
    seeing = [with_image(engine, f"image-{number}") for number in range(20)]
    text = [engine.add(4, 2, offline=True) for _ in range(3)]
    longest_ms = 0.0
    while live.request_id in engine.scheduler.requests:
        longest_ms = max(longest_ms, took_ms(engine))
        assert not encoded(engine)
    assert longest_ms <= 1.1 * alone_ms * 1.05, "its context grows"
    assert [row.num_output_tokens for row in text] == [2, 2, 2]
    assert not any(row.num_computed_tokens for row in seeing), "none holds memory meanwhile"
    while engine.scheduler.requests:
        engine.step()
    assert [row.num_output_tokens for row in seeing] == [3] * 20, "they run where no live request decodes"


def test_rows_pass_one_that_has_come_to_its_image(make: Make) -> None:
    engine = taught(make(harm=0.5))
    begun = with_image(engine, "image", text=2060)
    engine.step()
    most = begun.num_computed_tokens
    live = engine.add(100, 100)
    text = [engine.add(4, 2, offline=True) for _ in range(3)]
    while live.request_id in engine.scheduler.requests:
        engine.step()
        assert not encoded(engine)
    assert most < begun.num_computed_tokens == 2060
    assert [row.num_output_tokens for row in text] == [2, 2, 2]
    while engine.scheduler.requests:
        engine.step()
    assert begun.num_output_tokens == 3


@pytest.mark.parametrize("size", [SIZE, 800])
def test_one_image_at_a_time_is_encoded_beside_no_live_request_however_long_it_takes(
    make: Make, size: int
) -> None:
    engine = taught(make(tbt_slo_ms=100, ttft_slo_ms=300))
    for number in range(12):
        with_image(engine, f"image-{number}", size=size)
    images = []
    while engine.scheduler.requests:
        engine.step()
        images.append(encoded(engine))
    assert (sum(images), max(images)) == (12, 1 if size == 800 else max(images))


def test_a_live_request_has_its_image_encoded_at_once(make: Make) -> None:
    """Its iteration has no row in it, and may be longer than the gap of another allows."""
    engine = taught(make(tbt_slo_ms=40, ttft_slo_ms=1000))
    engine.add(100, 100)
    rows = [engine.add(50, 100, offline=True) for _ in range(5)]
    for _ in range(10):
        engine.step()
    live = with_image(engine, "live", offline=False)
    while not live.num_output_tokens:
        ms = took_ms(engine)
        if encoded(engine):
            plan = engine.scheduler.last_iteration.plan
            assert plan.predicted_ms == pytest.approx(ms, rel=0.02), "its image is foreseen"
            assert not {row.request_id for row in rows} & plan.tokens.keys()
    assert engine.scheduler.encoder_cache_manager.cached.keys() >= {"live"}


def test_an_image_that_is_in_the_cache_takes_no_time(make: Make) -> None:
    engine = taught(make(tbt_slo_ms=100, ttft_slo_ms=5000))
    engine.add(100, 100)
    engine.step()
    rows = [with_image(engine, "first") for _ in range(2)]
    engine.step()
    assert all(row.num_computed_tokens for row in rows), "both in one iteration, which has time for one image"
    assert not encoded(engine)


def test_live_requests_alone_teach_the_time_of_images(make: Make) -> None:
    engine = make(harm=0.1)
    for number in range(3):
        with_image(engine, f"image-{number}", offline=False)
        while engine.scheduler.requests:
            engine.step()
    learned = engine.scheduler.conserve()["latency_model"]["encoders"]
    assert learned["iterations"] == 3
    assert learned["embedding_ms"] == pytest.approx(EMBEDDING_MS, rel=0.05)
