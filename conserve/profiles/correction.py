"""A latency model that corrects itself from measured iterations and knows its error.

It keeps two quantities. The *scale* follows the drift of times from the profile's (`drift`). The *margin* is the
factor that 99 % of recent iterations stayed under: the conformal quantile of measured / predicted over a sliding
window. It is taken from iterations about as long as the budget, since short ones scatter by a far
larger share of their length. If iterations are planned for budget / (scale * margin), about 1 % of them overrun at
most, as long as residuals stay as they were.

Where errors depend on the kind of iteration, neither helps: then the coefficients are fitted again (`refit`).
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import exp, inf, log
from pathlib import Path

import msgspec
import numpy as np

from conserve.profiles.batch import Batch, Slice
from conserve.profiles.drift import LARGEST_SCALE, LASTING_WEIGHT, Drift, bounded_log
from conserve.profiles.fit import Samples
from conserve.profiles.margin import (
    STEPS,
    WINDOW,
    NewestResiduals,
    Residual,
    margin_beyond,
    margin_near,
    planned_ms,
    step_of,
)
from conserve.profiles.model import LatencyModel, LinearModel
from conserve.profiles.refit import FittedReach, Refit, logs_of
from conserve.whole import write_whole

REFRESH = 16  # iterations between two computations of a margin


@dataclass(slots=True, kw_only=True)
class Correction:
    """The part of a corrected model that is learned from iterations; a file keeps it over restarts, if wanted."""

    of: str = ""  # stamp of the profile that it corrects
    log_scale: float = 0.0
    error: float = 0.0  # forgetting mean of |predicted - measured| / measured
    seen: int = 0
    residuals: list[Residual] = field(default_factory=list)  # newest last
    coefficients: dict[str, float] | None = None  # fitted again; None: those of the profile
    rows: list[list[float]] = field(default_factory=list)  # the iterations that fits are to; see `refit`

    @property
    def scale(self) -> float:
        """Factor on the model's predictions."""
        return exp(self.log_scale)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_whole(path, msgspec.json.encode(self))

    @classmethod
    def load(cls, path: Path, *, of: str) -> "Correction | None":
        """The correction that an earlier run learned for the profile `of`; None if there is no readable one."""
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        return found if found.of == of else None

    def applied_to(self, model: LinearModel) -> LinearModel:
        """The model with the learned coefficients and scale; the model as it is if it has other terms."""
        coefficients = model.coefficients if self.coefficients is None else self.coefficients
        try:
            return type(model)({name: self.scale * ms for name, ms in coefficients.items()})
        except ValueError:
            return model

    @property
    def out_of_bounds(self) -> bool:
        """True if the drift is larger than a correction should hide: the profile should be measured again."""
        return abs(self.log_scale) >= log(LARGEST_SCALE)


class CorrectedModel:
    """A `LatencyModel` that corrects another one: `predict` is the best guess, `can_schedule` keeps the margin."""

    def __init__(
        self,
        model: LatencyModel,
        residuals: Iterable[Residual] = (),
        *,
        overrun_share: float = 0.01,
        correction: Correction | None = None,
        reach: FittedReach | None = None,
    ) -> None:
        """`residuals` are the profile's; measured iterations replace them as they come in.

        `reach`: of the batches that `model` was fitted to.
        """
        start = correction or Correction()
        self.first = self.model = model  # as the profile or the warm-up has it, and as it is now
        if start.coefficients is not None:
            try:
                self.model = with_coefficients(model, start.coefficients)
            except ValueError:  # of a model with other terms
                start = Correction(of=start.of)
        self.overrun_share = overrun_share
        self.refits = 0  # times that the coefficients were replaced
        self._refit = Refit(model, reach, map(tuple, start.rows)) if isinstance(model, LinearModel) else None
        self._of = start.of
        self._drift = Drift(start.log_scale)
        self._error = start.error
        self._seen = start.seen
        profiled = list(residuals)
        self._residuals = NewestResiduals(start.residuals or profiled)
        self._off: deque[float] = deque(maxlen=WINDOW)
        self._longest_ms = max((r.predicted_ms for r in (*profiled, *start.residuals)), default=inf)
        self._margins: dict[int, float] = {}  # by length, in quarters of its binary logarithm

    @property
    def scale(self) -> float:
        """Factor on the model's predictions for the next iteration."""
        return self._drift.factor

    @property
    def lasting_scale(self) -> float:
        """The factor without what only the last few iterations had."""
        return self._drift.lasting

    def margin(self, at_ms: float) -> float:
        """Factor on predictions of about `at_ms` that at most `overrun_share` of recent iterations exceeded.

        It is larger if no iteration was as long, neither in the profile nor since.
        """
        step = step_of(at_ms)
        if step not in self._margins:
            self._margins[step] = self._margin_of(step)
        return self._margins[step]

    def _margin_of(self, step: int) -> float:
        rounded_ms: float = 2 ** (step / STEPS)
        near = margin_near(self._residuals.table, rounded_ms, self.overrun_share)
        return margin_beyond(near, rounded_ms, self._longest_ms)

    def _refresh(self, late: bool) -> None:
        """Compute a few of the margins again, each every `REFRESH` iterations, or all: a plan would wait for it."""
        steps = [*self._margins]
        for step in steps if late else steps[self._seen % REFRESH :: REFRESH]:
            self._margins[step] = self._margin_of(step)

    @property
    def margins(self) -> Mapping[int, float]:
        """The margins that were asked for since the last fit, by `step_of` their time."""
        return self._margins

    @property
    def error(self) -> float:
        """Mean relative error of recent predictions, each made before its iteration was measured."""
        return self._error

    @property
    def off(self) -> list[float]:
        """|predicted / actual - 1| of the last iterations, each predicted before it was measured."""
        return list(self._off)

    @property
    def correction(self) -> Correction:
        """The correction learned so far."""
        return Correction(
            of=self._of,
            log_scale=self._drift.log_lasting,
            error=self._error,
            seen=self._seen,
            residuals=[Residual._make(row) for row in self._residuals.table.tolist()],
            coefficients=None if self.model is self.first else coefficients_of(self.model),
            rows=[[*row] for row in self._refit.rows] if self._refit is not None else [],
        )

    def predict(self, batch: Batch) -> float:
        """Predicted time of the batch, in ms; half of the iterations take longer."""
        return self.scale * self.model.predict(batch)

    def can_schedule(self, batch: Batch, request: Slice, tbt_ms: float) -> int:
        """Most tokens of the request with which the batch overruns `tbt_ms` in `overrun_share` of cases at most.

        Source: conserve-2026 section 4.2, ``can_schedule(batch, req, TBT)``.
        """
        if tbt_ms <= 0:
            return 0
        return self.model.can_schedule(batch, request, planned_ms(self.margin, tbt_ms) / self.scale)

    def observe(self, batch: Batch, ms: float) -> None:
        """Learn from an iteration that took `ms` milliseconds."""
        predicted = self.predict(batch)
        if predicted <= 0 or ms <= 0:
            return
        residual = ms / predicted
        self._seen += 1
        off = abs(1 / residual - 1)
        self._off.append(off)
        self._error += max(LASTING_WEIGHT, 1 / self._seen) * (off - self._error)
        self._drift.observe(residual * self.scale)
        self._residuals.append(Residual(predicted, residual))
        self._longest_ms = max(self._longest_ms, predicted)
        self._refresh(late=residual > self._margins.get(step_of(predicted), inf))
        if self._refit is not None and isinstance(self.model, LinearModel):
            better = self._refit.observe(batch, ms, self.model)
            if better is not None:
                self._use(better, Samples.of_sums(self._refit.rows))

    def _use(self, model: LinearModel, samples: Samples) -> None:
        """Replace the coefficients, and what was learned about the earlier ones by what `samples` say of these."""
        logs = logs_of(model, samples)
        self.model, self.refits = model, self.refits + 1
        self._drift.restart(bounded_log(float(np.median(logs))))
        ratios = np.exp(logs - self._drift.log_lasting)
        predicted_ms = samples.ms / ratios
        self._residuals = NewestResiduals(map(Residual, predicted_ms, ratios))
        self._longest_ms = float(predicted_ms.max())
        self._margins.clear()


def coefficients_of(model: LatencyModel) -> dict[str, float] | None:
    """The model's coefficients, if it has any."""
    return model.coefficients if isinstance(model, LinearModel) else None


def with_coefficients(model: LatencyModel, coefficients: Mapping[str, float]) -> LatencyModel:
    """The model with other coefficients; raises ValueError if it has other terms."""
    return type(model)(coefficients) if isinstance(model, LinearModel) else model


class FrozenModel:
    """A corrected model as it was at one moment: a `LatencyModel` that learns nothing.

    For a time whose margin was not asked for then, it takes that of the nearest time; 1 if there is none.
    """

    def __init__(self, model: LatencyModel, *, scale: float, margins: Mapping[int, float]) -> None:
        self.model, self.scale, self.margins = model, scale, margins

    def predict(self, batch: Batch) -> float:
        """Predicted time of the batch, in ms."""
        return self.scale * self.model.predict(batch)

    def can_schedule(self, batch: Batch, request: Slice, tbt_ms: float) -> int:
        """Most tokens of the request with which the batch keeps `tbt_ms`, with the margin."""
        if tbt_ms <= 0:
            return 0
        return self.model.can_schedule(batch, request, planned_ms(self.margin, tbt_ms) / self.scale)

    def margin(self, at_ms: float) -> float:
        """Factor on predictions of about `at_ms`."""
        step = step_of(at_ms)
        nearest = min(self.margins, key=lambda known: abs(known - step), default=None)
        return 1.0 if nearest is None else self.margins[nearest]
