"""Stock vLLM beside the plug-in's server: both run already, and one of them has requests at a time."""

from dataclasses import dataclass

from conserve.bench.attainment import LatencyLimits
from conserve.bench.deployment import OneServer
from conserve.bench.field import Turn
from conserve.bench.load import LoadTarget
from conserve.bench.names import ONLINE_ONLY_PLANNED
from conserve.bench.stock import StockServer
from conserve.names import ONLINE_ONLY


@dataclass(frozen=True, slots=True, kw_only=True)
class StockBeside:
    """The field of a comparison on two servers: stock vLLM has the turns of `online-only`.

    Rows of the plug-in's server wait meanwhile, as they do under `online-only/planned`.
    """

    plugged: OneServer
    stock: StockServer
    target: LoadTarget  # of the stock server

    async def turn(self, policy: str, slo: LatencyLimits | None) -> Turn:
        """Switch the plug-in's server to this policy, or have its rows wait."""
        turn = await self.plugged.turn(ONLINE_ONLY_PLANNED if policy == ONLINE_ONLY else policy, slo)
        return turn._replace(server=self.stock, target=self.target) if policy == ONLINE_ONLY else turn

    async def played(self, policy: str) -> None:
        """Look at the queue as for the plug-in's server alone."""
        await self.plugged.played(policy)
