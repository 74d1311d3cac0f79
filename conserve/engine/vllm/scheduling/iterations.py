"""Times of iterations: the latency model learns from them, and the ones that took too long are counted."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

from conserve.engine.known_times import KnownTimes
from conserve.engine.runtime.ranked import Ranked, quantiles
from conserve.engine.vllm.iteration import Iteration
from conserve.engine.vllm.profiling.warm_up import WarmUp
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.correction import CorrectedModel, Correction
from conserve.profiles.encoders import EncoderTimes
from conserve.profiles.fit import fit
from conserve.profiles.hygen import HyGenModel
from conserve.profiles.model import LinearModel, added_ms
from conserve.profiles.worth import Worth

log = logging.getLogger(__name__)
SAVE_S = 30.0  # between two saves of what was learned
CLOSE_S = 2.0  # that a save may take when the engine ends
WARM_UP = "warm-up"  # source of a model that was learned at the start
UNSAVED = "what was learned about iteration times could not be saved: %s"
# Time of a prompt token with logprobs beyond one without, in times of the latter, until it is measured.
SURCHARGE = 3.0
ENCODER = 1.0  # time of an image, in times of as many prompt tokens, until one was measured
SURCHARGE_SHARE = 0.2  # weight of the newest iteration in what was measured
# An iteration so many times longer than predicted, and of so many ms, that the process stood still in it.
STANDSTILL, STANDSTILL_MS = 20.0, 1000.0


class Iterations:
    """The latency model, corrected by every iteration that was computed whole, and counts of overruns."""

    def __init__(self, times: KnownTimes | None, *, learns: bool = True) -> None:
        """`times`: None where the warm-up brings the model.

        `learns`: False for a model that only embeds, whose iterations vLLM composes: it cuts no prompt.
        """
        self.model: CorrectedModel | None = times.corrected_model() if times is not None else None
        self.warm_up = WarmUp() if times is None and learns else None
        self.worth = Worth.by(self.model.first) if self.model is not None else Worth()
        # HyGen's predictor, by the same measurements.
        self.hygen: HyGenModel | None = times.hygen_model() if times is not None else None
        self.counted = self.planned = self.overruns = self.standstills = 0
        self._correction_file = Path(times.correction) if times is not None else None
        self._source = times.source if times is not None else WARM_UP
        self._surcharge_ms: float | None = None
        self.encoders = EncoderTimes()
        self._ended = 0.0  # monotonic seconds, of the last iteration
        self._stood_still = False  # in the last iteration
        self._busy_s = 0.0  # time in iterations
        self._save_at = time.monotonic() + SAVE_S
        self._saving: threading.Thread | None = None

    @property
    def surcharge_ms(self) -> float:
        """Time of a prompt token with logprobs beyond the model's prediction; a guess until one was seen."""
        if self._surcharge_ms is not None or self.model is None:
            return self._surcharge_ms or 0.0
        tokens = 512
        return SURCHARGE * added_ms(self.model, Slice(tokens, 0)) / tokens

    def encoder_ms(self, embeddings: int) -> float:
        """Time of encoding an image or a sound of so many embeddings, in ms; a guess until one was encoded."""
        if self.encoders.known or self.model is None:
            return self.encoders.predict(embeddings)
        return ENCODER * added_ms(self.model, Slice(embeddings, 0))

    def end(self, iteration: Iteration, ended: float) -> None:
        """Note the time that the iteration took."""
        # Where iterations overlap (asynchronous scheduling), one begins in earnest when the last has ended.
        iteration.took_s = ended - max(iteration.started, self._ended)
        self._ended = ended

    def learn(self, iteration: Iteration) -> None:
        """Learn from the time that the iteration took, if all of its tokens were computed."""
        if iteration.tokens:
            self._busy_s += iteration.took_s
            self.counted += 1
            self._count_overrun(iteration)
            if iteration.batch is not None and (ms := iteration.batch_ms) is not None:
                self._stood_still = self._stands_out(iteration, iteration.batch, ms)
                if self._stood_still:
                    self.standstills += 1
                else:
                    self._learn(iteration, iteration.batch, ms)
        if self._correction_file is not None and self._ended >= self._save_at:
            self.save()

    def save(self) -> None:
        """Begin to write the correction to its file, unless the disk is busy with the last one; never raises.

        A thread of its own writes: a folder on a network may hang, and live requests would wait for it.
        """
        self._save_at = time.monotonic() + SAVE_S
        busy = self._saving is not None and self._saving.is_alive()
        if self.model is None or self._correction_file is None or busy:
            return
        what = self.model.correction, self._correction_file
        saving = threading.Thread(target=_save, args=what, daemon=True, name="conserve-correction")
        try:
            saving.start()
        except RuntimeError as error:  # the limit of processes is reached
            log.warning(UNSAVED, error)
        else:
            self._saving = saving

    def close(self) -> None:
        """Save the correction once more, as far as the disk is fast enough."""
        self._wait()
        self.save()
        self._wait()

    def _wait(self) -> None:
        if self._saving is not None:
            self._saving.join(CLOSE_S)

    def end_warm_up(self) -> None:
        """Fit a model to the iterations of the warm-up, if there are enough of them."""
        if self.warm_up is not None and (model := self.warm_up.fitted()) is not None:
            self.hygen = fit(HyGenModel, self.warm_up.samples)
            self.model, self.warm_up, self.worth = model, None, Worth.by(model.first)

    def described(self) -> dict[str, Any] | None:
        """The latency model and its last errors, for JSON; None while there is no model."""
        linear = self.model.model if self.model is not None else None
        if self.model is None or not isinstance(linear, LinearModel):
            return None
        off = Ranked.of(self.model.off)
        return {
            "name": linear.name,
            "source": self._source,
            "coefficients": linear.coefficients,
            "scale": self.model.lasting_scale,
            "refits": self.model.refits,
            "off": {"iterations": len(off), **quantiles(off)},
            "encoders": self.encoders.document(),
        }

    def report(self) -> dict[str, Any]:
        """Counts since the start, for JSON."""
        return {
            "iterations": self.counted,
            "planned": self.planned,
            "overruns": self.overruns,
            "standstills": self.standstills,
            "busy_s": self._busy_s,
        }

    def _count_overrun(self, iteration: Iteration) -> None:
        """Compare the time of an iteration with offline tokens to its limit, also if rows left it or joined it.

        One that all requests left tells nothing.
        """
        lasted_ms, limit_ms = iteration.lasted_ms, iteration.limit_ms
        whole = iteration.batch is not None and len(iteration.left) < len(iteration.tokens)
        if whole and lasted_ms is not None and limit_ms is not None:
            self.planned += 1
            self.overruns += lasted_ms > limit_ms

    def _stands_out(self, iteration: Iteration, batch: Batch, ms: float) -> bool:
        """True if the process stood still in the iteration, as where a machine is moved or a process stopped.

        Such a time tells nothing of the next iterations. After one standstill the next is taken for a slow engine.
        """
        foretold = not (iteration.encodes or iteration.surcharged)
        if self.model is None or not foretold or self._stood_still or ms < STANDSTILL_MS:
            return False
        return ms > STANDSTILL * self.model.predict(batch)

    def _learn(self, iteration: Iteration, batch: Batch, ms: float) -> None:
        if iteration.encodes:
            if self.model is not None and not iteration.surcharged:
                beyond_ms = ms - self.model.predict(batch)
                self.encoders.observe(len(iteration.encodes), sum(iteration.encodes.values()), beyond_ms)
        elif self.model is None:
            if self.warm_up is not None:
                self.warm_up.add(batch, ms)
        elif iteration.surcharged:
            beyond_ms = max(0.0, ms - self.model.predict(batch)) / iteration.surcharged
            self._surcharge_ms = self.surcharge_ms + SURCHARGE_SHARE * (beyond_ms - self.surcharge_ms)
        else:
            self.model.observe(batch, ms)


def _save(correction: Correction, file: Path) -> None:
    try:
        correction.save(file)
    except OSError as error:
        log.warning(UNSAVED, error)
