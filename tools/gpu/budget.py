"""Time of a call: which steps still fit."""

from collections.abc import Callable
from dataclasses import dataclass

STOP_S = 25.0  # to end a server, of every step


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Seconds that a call may take, since it began."""

    limit_s: float
    began: float
    clock: Callable[[], float]

    def left_s(self) -> float:
        """Seconds left for steps, without those to end a server."""
        return self.limit_s - STOP_S - (self.clock() - self.began)

    def allow(self, *, least_s: float, most_s: float) -> float | None:
        """Seconds that a step may take; None if it does not fit."""
        left = self.left_s()
        return min(most_s, left) if left >= least_s else None

    def why_left_out(self, least_s: float) -> str:
        """The sentence for a step that does not fit."""
        return f"it needs {least_s:.0f} s, and {max(0.0, self.left_s()):.0f} s are left"
