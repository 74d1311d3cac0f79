"""Promises to live requests: quantiles and means of their TTFT and TBT, and harm (docs/adr/0015)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Any, Self

from conserve.engine.policy.view import Slo
from conserve.names import DEFAULT_HARM

ALONE = "p99"  # quantile that a time without a name bounds: 1 % of iterations exceed their plan
MEAN = "mean"
RANK = re.compile(r"p(\d{1,2}(?:\.\d+)?)")
LATENCIES = ("ttft_ms", "tbt_ms")
HARMS = ("harm", "default_harm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """Bounds in ms by name (`p50`, `p99.9`, `mean`), of TTFT and of TBT; and the largest harm."""

    ttft_ms: Mapping[str, float] = field(default_factory=dict)
    tbt_ms: Mapping[str, float] = field(default_factory=dict)
    harm: float | None = None
    default_harm: float | None = None  # to the latency that has no bound, where the other one has

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Self:
        """Read `{"ttft_ms": 1500, "tbt_ms": {"p50": 40, "p99": 150}, "harm": 0.1}`; raises ValueError.

        The form that `document` writes is read too. A time without a name is that of the P99.
        """
        unknown = said.keys() - {*LATENCIES, *HARMS, "promises"}
        if unknown:
            raise ValueError(f"there is no promise {', '.join(sorted(unknown))}")
        named = said.get("promises") or said
        for harm in (said.get(name) for name in HARMS):
            if harm is not None and not _above_zero(harm):
                raise ValueError(f"harm is a share above 0, not {harm!r}")
        return cls(
            ttft_ms=bounds(named.get("ttft_ms")),
            tbt_ms=bounds(named.get("tbt_ms")),
            harm=said.get("harm"),
            default_harm=said.get("default_harm"),
        )

    def with_default_harm(self) -> Self:
        """These promises of a user, and the default harm to each latency without one."""
        if self.harm is not None or (self.ttft_ms and self.tbt_ms):
            return self
        return replace(self, default_harm=DEFAULT_HARM) if self.any else replace(self, harm=DEFAULT_HARM)

    @property
    def slo(self) -> Slo:
        """The largest bound of each latency: no iteration is planned beyond it."""
        return Slo(
            ttft_ms=ceiling_ms(self.ttft_ms),
            tbt_ms=ceiling_ms(self.tbt_ms),
            harm=self.harm,
            stand_in_ttft_harm=None if self.ttft_ms else self.default_harm,
            stand_in_tbt_harm=None if self.tbt_ms else self.default_harm,
        )

    @property
    def any(self) -> bool:
        """True if anything is promised."""
        return bool(self.ttft_ms or self.tbt_ms or self.harm is not None)

    def document(self) -> dict[str, Any]:
        """The promises for JSON, with the largest bound of each latency."""
        slo = {name: max(getattr(self, name).values(), default=None) for name in LATENCIES}
        return {
            **slo,
            **{name: getattr(self, name) for name in HARMS},
            "promises": {name: dict(getattr(self, name)) for name in LATENCIES},
        }


def bounds(said: Any) -> dict[str, float]:
    """Bounds by name, smallest quantile first, from a number, a mapping or None; raises ValueError."""
    if said is None:
        return {}
    named = said if isinstance(said, Mapping) else {ALONE: said}
    for name, ms in named.items():
        if name != MEAN and not rank(name):
            raise ValueError(f"a promise is of p1 to p99.9 or of the mean, not of {name!r}")
        if not _above_zero(ms):
            raise ValueError(f"a promise takes milliseconds above 0, not {ms!r}")
    ordered = dict(sorted(named.items(), key=lambda one: (one[0] == MEAN, rank(one[0]))))
    quantiles = [name for name in ordered if name != MEAN]
    for lower, higher in pairwise(quantiles):
        if ordered[higher] < ordered[lower]:
            raise ValueError(f"{higher} cannot be less than {lower}")
    return {name: float(ms) for name, ms in ordered.items()}


def rank(name: str) -> float:
    """Share of latencies that a bound of this name holds for, 0 to 1; 0 for the mean and for other names."""
    found = RANK.fullmatch(name)
    return float(found[1]) / 100 if found else 0.0


def ceiling_ms(named: Mapping[str, float]) -> float:
    """Largest bound of a quantile; infinite without one."""
    return max((ms for name, ms in named.items() if name != MEAN), default=inf)


def _above_zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf
