"""Rows of jobs that would miss their deadline: they may fill iterations beyond the usual limit (docs/adr/0030)."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

NEVER = 1.0  # scale at which such rows push nothing
LARGEST_SCALE = 10.0


@dataclass(slots=True)
class Pushing:
    """Such rows in the engine, the largest scale of an iteration's limit that they may use, and what they used."""

    largest_scale: float = NEVER
    rows: set[str] = field(default_factory=set)
    tokens: int = 0  # computed beyond the usual limit

    @property
    def urgent(self) -> Set[str]:
        """Rows that may go beyond the usual limit."""
        return frozenset(self.rows) if self.largest_scale > NEVER else frozenset()

    @property
    def scale(self) -> float:
        """Scale of the limit up to which they may in the next iteration."""
        return self.largest_scale if self.rows else NEVER

    def computed(self, tokens: Mapping[str, int], *, but: Set[str]) -> None:
        """Count the tokens of an iteration beyond the usual limit, without those of rows that left it."""
        self.tokens += sum(count for name, count in tokens.items() if name not in but)

    def report(self) -> dict[str, float]:
        """Scale, rows and tokens, for JSON."""
        return {
            "largest_slo_scale": self.largest_scale,
            "slo_scale": self.scale,
            "rows": len(self.rows),
            "tokens": self.tokens,
        }
