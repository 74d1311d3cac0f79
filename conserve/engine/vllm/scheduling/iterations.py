"""The engine's iterations, timed: the latency model learns from them, and overruns are counted."""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput

from conserve.engine.policy.plan import Plan
from conserve.engine.runtime.traffic import quantiles
from conserve.engine.vllm.profiling.warm_up import WarmUp
from conserve.engine.vllm.settings import EngineSettings
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.correction import CorrectedModel
from conserve.profiles.model import LinearModel
from conserve.profiles.worth import Worth

log = logging.getLogger(__name__)
SAVE_S = 30.0  # between two saves of what was learned
SURCHARGE = 3.0  # of a token with prompt logprobs, in times of a token without, until it is known
SURCHARGE_SHARE = 0.2  # of the newest iteration in what is known


class Scheduled(NamedTuple):
    """An iteration under way."""

    started: float  # monotonic seconds
    batch: Batch | None = None  # None where nothing is learned from it
    limit_ms: float | None = None  # that it was planned to stay within
    surcharged: int = 0  # tokens that take longer than the model knows


class Iterations:
    """Keeps the model, follows the machine with it, and remembers how often it was wrong."""

    def __init__(self, installed: EngineSettings) -> None:
        self.model: CorrectedModel | None = installed.model
        self.warm_up = WarmUp() if installed.model is None else None
        self.worth = Worth.by(installed.model) if installed.model is not None else Worth()
        self.counted = self.planned = self.overruns = 0
        self._correction_file = installed.correction_file
        self._source = installed.source
        self._surcharge_ms: float | None = None
        self._under_way: dict[int, Scheduled] = {}  # by id() of vLLM's SchedulerOutput
        self._ended = 0.0
        self._busy_s = 0.0  # spent in iterations
        self._save_at = time.monotonic() + SAVE_S

    @property
    def surcharge_ms(self) -> float:
        """Time of a prompt token with logprobs beyond the model's prediction; a guess until one was seen."""
        if self._surcharge_ms is not None or self.model is None:
            return self._surcharge_ms or 0.0
        tokens = 512
        whole, empty = Batch.of([Slice(tokens, 0)]), Batch()
        return SURCHARGE * (self.model.predict(whole) - self.model.predict(empty)) / tokens

    def begin(
        self,
        output: SchedulerOutput,
        started: float,
        *,
        batch: Batch | None = None,
        plan: Plan | None = None,
        surcharged: int = 0,
    ) -> None:
        """An iteration starts; without a `batch` only its time is counted."""
        limit_ms = plan.limit_ms if plan is not None else None
        self._under_way[id(output)] = Scheduled(started, batch, limit_ms, surcharged)

    def end(self, output: SchedulerOutput, ended: float, *, whole: bool = True) -> None:
        """It is over: learn from the time it took, if it was all computed."""
        scheduled = self._under_way.pop(id(output))
        # Where batches overlap (asynchronous scheduling), one begins in earnest when the last has ended.
        took_s = ended - max(scheduled.started, self._ended)
        self._ended = ended
        if output.total_num_scheduled_tokens:
            self._busy_s += took_s
            if whole and scheduled.batch is not None:
                self._learn(scheduled, scheduled.batch, took_s * 1e3)
        if self._correction_file is not None and ended >= self._save_at:
            self.save()

    def save(self) -> None:
        """Keep what was learned; never raises."""
        self._save_at = time.monotonic() + SAVE_S
        if self.model is None or self._correction_file is None:
            return
        try:
            self.model.correction.save(self._correction_file)
        except OSError as error:
            log.warning("what was learned about iteration times could not be saved: %s", error)

    def end_warm_up(self) -> None:
        """Fit a model to what was seen, if that is enough by now."""
        if self.warm_up is not None and (model := self.warm_up.fitted()) is not None:
            self.model, self.warm_up, self.worth = model, None, Worth.by(model)

    def described(self) -> dict[str, Any] | None:
        """The latency model as it is now and how far off it was, for JSON; None while there is none."""
        linear = self.model.model if self.model is not None else None
        if self.model is None or not isinstance(linear, LinearModel):
            return None
        off = sorted(self.model.off)
        return {
            "name": linear.name,
            "source": self._source,
            "coefficients": linear.coefficients,
            "scale": self.model.scale,
            "off": {"iterations": len(off), **quantiles(off)},
        }

    def report(self) -> dict[str, Any]:
        """Counts since the start, for JSON."""
        return {
            "iterations": self.counted,
            "planned": self.planned,
            "overruns": self.overruns,
            "busy_s": self._busy_s,
        }

    def _learn(self, scheduled: Scheduled, batch: Batch, ms: float) -> None:
        self.counted += 1
        if scheduled.limit_ms is not None:
            self.planned += 1
            self.overruns += ms > scheduled.limit_ms
        if self.model is None:
            if self.warm_up is not None:
                self.warm_up.add(batch, ms)
        elif scheduled.surcharged:
            beyond_ms = max(0.0, ms - self.model.predict(batch)) / scheduled.surcharged
            self._surcharge_ms = self.surcharge_ms + SURCHARGE_SHARE * (beyond_ms - self.surcharge_ms)
        else:
            self.model.observe(batch, ms)
