"""Every iteration within a time, whoever is in it: for batch runs that share their machine."""

from itertools import chain, islice

from conserve.engine.policy.composer import Composer
from conserve.engine.policy.offline import serve_least, serve_offline
from conserve.engine.policy.plan import Plan
from conserve.engine.policy.view import View


class Paced:
    """All requests are equal; the TBT of the SLO bounds each iteration."""

    decides = True
    holds_offline = False
    spares_offline = False

    def plan(self, view: View) -> Plan:
        """As much as fits, at least one token."""
        composer = Composer(view)
        running = [*view.online, *view.offline]
        waiting = chain(view.waiting_online, view.waiting_offline)
        first = list(islice(waiting, 1))
        serve_offline(composer, running, chain(first, waiting), view.slo.tbt_ms)
        serve_least(composer, running, first)
        return composer.plan()
