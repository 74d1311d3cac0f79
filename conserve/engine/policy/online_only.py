"""Baseline for latency: every offline request is deferred."""

from math import inf

from conserve.engine.policy.composer import Composer
from conserve.engine.policy.online import serve_online
from conserve.engine.policy.plan import Plan
from conserve.engine.policy.view import View


class OnlineOnly:
    """Schedules as an engine without offline work would; offline requests give up memory to online ones."""

    decides = True
    holds_offline = True
    spares_offline = False
    repeats = True  # a plan of decode steps alone holds while nothing but their contexts changes

    def plan(self, view: View) -> Plan:
        """Phase 1 alone, without a TBT limit."""
        composer = Composer(view)
        serve_online(composer, view, tbt_ms=inf)
        return composer.plan()
