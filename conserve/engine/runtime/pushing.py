"""Rows of jobs that would miss their deadline: while there are any, live requests bear a scale of their SLO."""

from dataclasses import dataclass, field, replace

from conserve.engine.policy.view import Slo

NEVER = 1.0  # scale at which such rows push nothing
LARGEST_SCALE = 10.0


@dataclass(slots=True)
class Pushing:
    """Such rows in the engine, and the largest scale of the SLO that they may use."""

    largest_scale: float = NEVER
    rows: set[str] = field(default_factory=set)

    @property
    def scale(self) -> float:
        """Scale of the SLO that the next iteration is planned by."""
        return self.largest_scale if self.rows else NEVER

    def bounds(self, slo: Slo) -> Slo:
        """Bounds on the next iteration at that scale. A harm is a share beyond 1, which is what grows."""
        if self.scale == NEVER:
            return slo
        return replace(
            slo,
            ttft_ms=slo.ttft_ms * self.scale,
            tbt_ms=slo.tbt_ms * self.scale,
            harm=None if slo.harm is None else (1 + slo.harm) * self.scale - 1,
            largest_ttft_ms=None if slo.largest_ttft_ms is None else slo.largest_ttft_ms * self.scale,
            largest_tbt_ms=None if slo.largest_tbt_ms is None else slo.largest_tbt_ms * self.scale,
        )

    def report(self) -> dict[str, float]:
        """Scale and rows, for JSON."""
        return {"largest_slo_scale": self.largest_scale, "slo_scale": self.scale, "rows": len(self.rows)}
