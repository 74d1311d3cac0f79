"""A checkpoint policy of one's own: the rows with the most KV that is not copied yet come first.

PYTHONPATH=examples conserve serve MODEL --ttft-slo 1s --kv-checkpoint longest_checkpoints.Longest
"""

from collections.abc import Mapping, Sequence

from conserve.engine.policy.checkpointing import Marked, Pressure, first_blocks

BEGIN = 0.5  # share of the device's blocks that is left for offline rows, below which copying begins


class Longest:
    """Copies the longest rows first: losing one of these would cost the most computing."""

    def __init__(self) -> None:
        self._rows: Sequence[Marked] = ()

    def wants_marks(self, pressure: Pressure) -> bool:
        """True if there is anything to decide; called before every iteration."""
        return pressure.share_left < BEGIN and pressure.budget > 0

    def checkpoint(self, rows: Sequence[Marked]) -> None:
        """Take the rows with blocks to copy, in the order in which they would be evicted."""
        self._rows = sorted(rows, key=lambda row: (row.online, -row.blocks))

    def blocks_to_checkpoint(self, pressure: Pressure) -> Mapping[str, int]:
        """Number of blocks to copy of each row beside the next iteration."""
        return first_blocks(self._rows, min(pressure.budget, pressure.host_room))
