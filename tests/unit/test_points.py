"""The batches that a profile is measured with."""

import random

import pytest

from conserve.errors import GridTooLarge
from conserve.profiles.batch import Slice
from conserve.profiles.points import (
    CHUNKS,
    CONTEXTS,
    MIXED,
    ROWS,
    IterationLimits,
    Point,
    grid_points,
    log_uniform,
    mixture,
    narrowed,
    plan,
    read_slices,
    with_noise,
    write_slices,
)

LIMITS = IterationLimits(tokens=2048, requests=16, context=8192, kv_tokens=200_000, block_tokens=128)
TIGHT = IterationLimits(tokens=10, requests=2, context=32, kv_tokens=64, block_tokens=16)


@pytest.mark.parametrize(
    ("slices", "held"),
    [
        ([], False),
        ([Slice(10, 0)], True),
        ([Slice(11, 0)], False),
        ([Slice(10, 6)], True),  # and 16 tokens more
        ([Slice(10, 7)], False),
        ([Slice(1, 0)] * 2, True),
        ([Slice(1, 0)] * 3, False),
        ([Slice(5, 11), Slice(5, 11)], True),  # two blocks each
    ],
)
def test_an_engine_holds_what_fits_with_some_decode_steps_more(slices: list[Slice], held: bool) -> None:
    assert TIGHT.hold(slices) == held


def test_blocks_are_whole() -> None:
    smaller = IterationLimits(tokens=10, requests=2, context=32, kv_tokens=63, block_tokens=16)
    assert not smaller.hold([Slice(5, 11), Slice(5, 11)])
    assert smaller.hold([Slice(5, 11)])


@pytest.mark.parametrize(
    ("text", "slices"),
    [
        ("", []),
        ("p512@0", [Slice(512, 0)]),
        ("d@1024", [Slice(1, 1024, True)]),
        ("d3@5", [Slice(3, 5, True)]),
        ("p1@7", [Slice(1, 7)]),
        ("p512@0 8*d@1024 p2@1", [Slice(512, 0), *[Slice(1, 1024, True)] * 8, Slice(2, 1)]),
    ],
)
def test_batches_are_written_and_read(text: str, slices: list[Slice]) -> None:
    assert write_slices(slices) == text
    assert read_slices(text) == tuple(slices)
    assert Point.parse(f"mixed {text}") == Point("mixed", tuple(slices))


@pytest.mark.parametrize("text", ["x5@0", "p5", "5*5*d@1", "p5@0,"])
def test_what_is_no_batch_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no part of a batch"):
        read_slices(text)


def test_the_grid_has_every_chunk_and_every_batch_of_steps_at_every_context() -> None:
    points = list(grid_points(LIMITS))
    assert len(points) == len(CHUNKS) * len(CONTEXTS) + len(ROWS) * (len(CONTEXTS) - 1)
    assert {(s.tokens, s.context) for p in points if p.kind == "prefill" for s in p.slices} == {
        (tokens, context) for tokens in CHUNKS for context in CONTEXTS
    }
    assert {(len(p.slices), p.slices[0]) for p in points if p.kind == "decode"} == {
        (rows, Slice(1, context, True)) for rows in ROWS for context in CONTEXTS[1:]
    }


def test_three_mixtures_follow_each_point_of_the_grid_and_the_noise_every_twelve() -> None:
    points = plan(LIMITS, seed=1)
    assert [n for n, point in enumerate(points) if point.kind == "noise"] == list(range(0, len(points), 13))
    others = [point for point in points if point.kind != "noise"]
    grid = [point for point in others if point.kind in ("prefill", "decode")]
    assert [point for point in others[: 4 * len(grid) : 4] if point.kind in ("prefill", "decode")] == grid
    mixed = [point for point in others if point.kind in ("mixed", "held-out")]
    assert len(mixed) == MIXED
    assert [n % 4 for n, point in enumerate(mixed) if point.kind == "held-out"] == [1] * (MIXED // 4)
    assert set(grid) == {point for point in grid_points(LIMITS) if LIMITS.hold(point.slices)}
    assert plan(LIMITS, seed=1) == points
    assert plan(LIMITS, seed=2) != points


def test_the_noise_is_one_batch_in_the_middle_of_the_space() -> None:
    point = Point("mixed", (Slice(1, 0),))
    noise = next(iter(with_noise([point], LIMITS)))
    assert noise == Point("noise", (Slice(256, 0), *[Slice(1, 512, True)] * 4))
    small = IterationLimits(tokens=64, requests=5, context=128, kv_tokens=4096, block_tokens=16)
    assert next(iter(with_noise([point], small))).slices == (Slice(32, 0), *[Slice(1, 64, True)] * 4)
    assert list(with_noise([point], TIGHT)) == [point]


def test_mixtures_fit_and_are_of_all_kinds() -> None:
    drawn = [mixture(random.Random(seed), LIMITS) for seed in range(300)]
    assert all(map(LIMITS.hold, drawn))
    chunks = [sum(not piece.decode for piece in batch) for batch in drawn]
    steps = [sum(piece.decode for piece in batch) for batch in drawn]
    assert set(chunks) == {0, 1, 2, 3}
    assert {0, 1, LIMITS.requests - 1} <= set(steps)
    assert all(piece.tokens == 1 for batch in drawn for piece in batch if piece.decode)
    assert min(piece.context for batch in drawn for piece in batch if piece.decode) < 100
    assert max(piece.context for batch in drawn for piece in batch) > 5000
    tokens = [sum(piece.tokens for piece in batch) for batch in drawn]
    assert min(tokens) < 16
    assert max(tokens) > 1500


def test_logarithms_are_uniform() -> None:
    dice = random.Random(1)
    drawn = [log_uniform(dice, 1, 10_000) for _ in range(1000)]
    assert 1 <= min(drawn) < 1.1
    assert 9_000 < max(drawn) <= 10_000
    assert 400 < sum(number < 100 for number in drawn) < 600
    assert log_uniform(dice, 5, 2) == pytest.approx(5)


def test_a_narrower_context_changes_nothing_else() -> None:
    assert narrowed(LIMITS, 8192) == LIMITS
    assert narrowed(LIMITS, 1).context == 1
    little = IterationLimits(tokens=1, requests=2, context=100, kv_tokens=50, block_tokens=5)
    assert narrowed(little, 50) == IterationLimits(
        tokens=1, requests=2, context=50, kv_tokens=50, block_tokens=5
    )
    for limits, context in ((LIMITS, 8193), (LIMITS, 0), (little, 51)):
        with pytest.raises(GridTooLarge):
            narrowed(limits, context)
