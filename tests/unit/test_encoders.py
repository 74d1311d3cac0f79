"""Times of encoders: learned from what iterations that encode took beyond their prediction."""

import random

import pytest

from conserve.profiles.encoders import WINDOW, EncoderTimes


def seen(*iterations: tuple[int, int, float]) -> EncoderTimes:
    times = EncoderTimes()
    for inputs, embeddings, ms in iterations:
        times.observe(inputs, embeddings, ms)
    return times


def test_nothing_is_predicted_before_an_image_was_encoded() -> None:
    assert EncoderTimes().predict(500) == 0.0
    assert EncoderTimes().known == 0


def test_one_image_tells_the_time_of_an_embedding() -> None:
    assert seen((1, 200, 50.0)).predict(400) == pytest.approx(100.0)


def test_images_of_one_size_are_not_told_apart_from_their_embeddings() -> None:
    times = seen(*((n, 200 * n, 50.0 * n) for n in (1, 2, 3)))
    assert times.predict(200) == pytest.approx(50.0)
    assert times.document() == {"iterations": 3, "input_ms": 0.0, "embedding_ms": pytest.approx(0.25)}


def test_a_small_image_takes_the_time_that_each_image_takes() -> None:
    dice = random.Random(5)
    iterations = []
    for _ in range(50):
        sizes = [dice.randint(50, 1000) for _ in range(dice.randint(1, 4))]
        iterations.append((len(sizes), sum(sizes), 12.0 * len(sizes) + 0.05 * sum(sizes)))
    times = seen(*iterations)
    assert (times.predict(10), times.predict(1000)) == pytest.approx((12.5, 62.0))


@pytest.mark.parametrize(
    ("iterations", "predicted"),
    [
        ([(1, 100, 50.0), (1, 1000, 50.0)], 50.0),  # each image takes as long
        ([(1, 1000, 50.0), (1, 100, 60.0)], 60.0),  # the large one by chance less
        ([(1, 100, 0.0), (1, 1000, 90.0)], 90.0 / 1000 * 500),  # a part for each would be below nought
    ],
)
def test_no_time_is_below_nought(iterations: list[tuple[int, int, float]], predicted: float) -> None:
    times = seen(*iterations)
    said = times.document()
    assert said["input_ms"] >= 0
    assert said["embedding_ms"] >= 0
    assert predicted * 0.9 <= times.predict(500) <= predicted * 1.3


def test_an_iteration_that_took_less_than_predicted_without_its_image_took_no_time_for_it() -> None:
    assert seen((1, 100, -5.0)).predict(100) == 0.0


def test_times_that_scatter_are_planned_with_a_margin() -> None:
    dice = random.Random(5)
    times = seen(*((1, 100, 40.0 * dice.uniform(0.8, 1.2)) for _ in range(WINDOW)))
    planned_ms = times.predict(100)
    longer = sum(40.0 * dice.uniform(0.8, 1.2) > planned_ms for _ in range(1000))
    assert 0 < longer <= 100


def test_old_times_are_forgotten() -> None:
    times = seen(*[(1, 100, 400.0)] * 10, *[(1, 100, 40.0)] * WINDOW)
    assert times.predict(100) == pytest.approx(40.0)
    assert times.known == WINDOW


def test_a_stall_of_the_machine_is_no_time_of_an_encoder() -> None:
    assert seen(*[(1, 100, 50.0)] * 10, (1, 100, 2000.0)).predict(100) < 150
    slower = seen(*[(1, 100, 50.0)] * 10, *[(1, 100, 200.0)] * WINDOW)
    assert slower.predict(100) == pytest.approx(200.0), "an engine that is slower now is believed"
