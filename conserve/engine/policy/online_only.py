"""The baseline of latency: offline requests are held out, as if they were not there."""

from math import inf

from conserve.engine.policy.composer import Composer
from conserve.engine.policy.online import serve_online
from conserve.engine.policy.plan import Plan
from conserve.engine.policy.view import View


class OnlineOnly:
    """What an engine without offline work would do; its requests wait, and give up memory when asked."""

    decides = True
    holds_offline = True
    spares_offline = False

    def plan(self, view: View) -> Plan:
        """Phase 1 alone, without a limit."""
        composer = Composer(view)
        serve_online(composer, view, tbt_ms=inf)
        return composer.plan()
