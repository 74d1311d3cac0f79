"""Sentences on a promise that live requests cannot keep even without rows. Imports nothing heavy, for `status`.

An iteration that is over its bound without offline tokens gets none (`policy/online.py`). The harm that a broken
promise allows counts where live requests alone would keep it (docs/adr/0015).
"""

from collections.abc import Mapping
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conserve.server_report import AloneReport

ROOM = 2.0  # times what live requests take alone: half of such an iteration is left to rows
ROWS = {
    "ttft_ms": "rows wait while such a prompt is computed",
    "tbt_ms": "rows wait while a live request gets tokens",
}


def why_broken(
    latency: str,
    promised: Any,
    alone: "AloneReport | None",
    *,
    holds_rows: bool = True,
    paused: bool = False,
) -> str | None:
    """Reason why live requests break a promise and what to do; None where they keep it alone, by the latency model.

    `promised` is in ms, or has times by name, of which the smallest counts. `holds_rows` is true of a policy that
    gives rows nothing in iterations that are late, `paused` where rows get nothing in any.
    """
    slo_ms = smallest_ms(promised)
    if alone is None or slo_ms is None or slo_ms >= alone.of(latency):
        return None
    thing = "a token" if latency == "tbt_ms" else f"a prompt of {alone.prompt_tokens} tokens"
    takes = f"{thing} takes {alone.of(latency):.0f} ms on this machine with nothing beside it"
    mend = f"raise it to {rounded_up(ROOM * alone.of(latency)):g}ms, or give --harm 10% in its place"
    rows = "rows pause for it" if paused else ROWS[latency]
    return "; ".join([takes, *([rows] if holds_rows else []), mend])


def smallest_ms(promised: Any) -> float | None:
    """Smallest time of a promise; None without one."""
    return min(promised.values(), default=None) if isinstance(promised, Mapping) else promised


def rounded_up(ms: float) -> float:
    """The time with two digits, rounded up."""
    unit = 10.0 ** (floor(log10(ms)) - 1)
    return float(f"{ceil(ms / unit - 1e-9) * unit:.6g}")
