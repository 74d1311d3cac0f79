"""A policy of one's own: offline rows get half of the time that the TBT SLO leaves beside live requests.

PYTHONPATH=examples conserve serve MODEL --ttft-slo 1s --tbt-slo 100ms --policy gentle_policy.Gentle
"""

from math import inf

from conserve.engine.policy.composer import Composer
from conserve.engine.policy.offline import serve_least, serve_offline
from conserve.engine.policy.online import serve_online
from conserve.engine.policy.plan import Plan
from conserve.engine.policy.view import View

IDLE_MS = 50.0  # longest iteration without live requests, one of which may arrive during it


class Gentle:
    """Plans each iteration from a picture of the engine (`View`), and keeps nothing in mind."""

    def plan(self, view: View) -> Plan:
        """Live requests first. A running request without tokens waits, and keeps its KV blocks."""
        composer = Composer(view)
        share = serve_online(composer, view, tbt_ms=view.slo.tbt_ms)
        if share.complete:
            online_ms = composer.predicted_ms
            spare_ms = share.limit_ms - online_ms
            limit_ms = online_ms + spare_ms / 2 if spare_ms < inf else IDLE_MS
            rows = iter(view.waiting_offline)
            running = serve_offline(composer, share.running_offline, rows, limit_ms)
            serve_least(composer, running, [], view.block_tokens)
        return composer.plan()
