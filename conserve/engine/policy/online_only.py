"""Live requests alone: the baseline for latency, and how a pause of rows is planned."""

from math import inf

from conserve.engine.policy.composer import Composer
from conserve.engine.policy.online import serve_online
from conserve.engine.policy.plan import Plan, Traits
from conserve.engine.policy.view import View


class OnlineOnly:
    """Schedules as an engine without offline work would; offline requests give up memory to online ones.

    `keeps_promises` holds a prompt's chunks to the TBT promised to the live requests beside it, as ConServe's
    policy does; vLLM makes a chunk as large as it may be.
    """

    traits = Traits(
        defers_offline=True,
        repeats=True,  # a plan of decode steps alone holds while nothing but their contexts changes
    )

    def __init__(self, *, keeps_promises: bool = False) -> None:
        self._tbt_ms = None if keeps_promises else inf

    def plan(self, view: View) -> Plan:
        """Phase 1 alone."""
        composer = Composer(view)
        serve_online(composer, view, tbt_ms=self._tbt_ms)
        return composer.plan()
