"""Times of encoders, which turn images and sounds into embeddings, learned from the iterations that encode.

No latency model knows these times: they are of another network than the one that the model describes.
"""

from collections import deque
from typing import NamedTuple

from conserve.profiles.margin import quantile_margin

WINDOW = 64  # iterations that are remembered
OVERRUN_SHARE = 0.05  # of encodings, that may take longer than their prediction
INPUTS_APART = 0.1  # relative spread of embeddings an input, from which two coefficients are told
ENOUGH = 3  # iterations from which on a time is bounded by its prediction
MOST_TIMES, MOST_MORE_MS = 2.0, 5.0  # so many times the prediction, and so much more


class Encoded(NamedTuple):
    """Inputs that the encoders saw in one iteration, and the time that they took."""

    inputs: int
    embeddings: int
    ms: float  # beyond the latency model's prediction of the iteration


class EncoderTimes:
    """A time for each input and one for each of its embeddings, by the last iterations that encoded."""

    def __init__(self) -> None:
        self._seen: deque[Encoded] = deque(maxlen=WINDOW)
        self._input_ms = self._embedding_ms = 0.0
        self._margin = 1.0

    @property
    def known(self) -> int:
        """Number of iterations that the times are from."""
        return len(self._seen)

    def observe(self, inputs: int, embeddings: int, ms: float) -> None:
        """Learn from an iteration that encoded so many inputs, and took `ms` longer than predicted without them."""
        if not inputs or not embeddings:
            return
        if len(self._seen) >= ENOUGH:  # a stall of the machine is no time of an encoder
            ms = min(ms, MOST_TIMES * self._ms(inputs, embeddings) + MOST_MORE_MS)
        self._seen.append(Encoded(inputs, embeddings, max(0.0, ms)))
        self._input_ms, self._embedding_ms = least_squares(self._seen)
        predicted = [self._ms(one.inputs, one.embeddings) for one in self._seen]
        ratios = [one.ms / ms for one, ms in zip(self._seen, predicted, strict=True) if ms > 0]
        self._margin = max(1.0, quantile_margin(ratios, OVERRUN_SHARE)) if len(ratios) > 1 else 1.0

    def predict(self, embeddings: int) -> float:
        """Time in ms that encoding one input of so many embeddings takes, with a margin; 0 while none was seen."""
        return self._margin * self._ms(1, embeddings)

    def document(self) -> dict[str, float]:
        """Times in ms of an input and of each of its embeddings, and of how many iterations they are, for JSON."""
        return {
            "iterations": self.known,
            "input_ms": self._input_ms,
            "embedding_ms": self._embedding_ms,
        }

    def _ms(self, inputs: int, embeddings: int) -> float:
        return self._input_ms * inputs + self._embedding_ms * embeddings


def least_squares(seen: "deque[Encoded]") -> tuple[float, float]:
    """Time in ms of an input and of an embedding, neither below 0, by least squares.

    Inputs that are all of about one size cannot tell the two apart: the time is the embeddings' then.
    """
    nn = sum(one.inputs**2 for one in seen)
    ne = sum(one.inputs * one.embeddings for one in seen)
    ee = sum(one.embeddings**2 for one in seen)
    nt = sum(one.inputs * one.ms for one in seen)
    et = sum(one.embeddings * one.ms for one in seen)
    apart = nn * ee - ne**2  # 0 where all inputs have as many embeddings
    if apart > (INPUTS_APART * ne) ** 2:
        input_ms, embedding_ms = (ee * nt - ne * et) / apart, (nn * et - ne * nt) / apart
        if input_ms >= 0 and embedding_ms >= 0:
            return input_ms, embedding_ms
        if embedding_ms < 0:
            return nt / nn, 0.0
    return 0.0, et / ee
