"""Every iteration within a time, whoever is in it: for batch runs that share their machine."""

from itertools import chain, islice

from conserve.engine.policy.composer import Composer
from conserve.engine.policy.offline import serve_offline
from conserve.engine.policy.plan import Plan
from conserve.engine.policy.view import Candidate, View


class Paced:
    """All requests are equal; the TBT of the SLO bounds each iteration."""

    decides = True
    spares_offline = False

    def plan(self, view: View) -> Plan:
        """As much as fits, at least one token: an engine that computes nothing never gets any further."""
        composer = Composer(view)
        running = [*view.online, *view.offline]
        waiting = chain(view.waiting_online, view.waiting_offline)
        first = list(islice(waiting, 1))
        serve_offline(composer, running, chain(first, waiting), view.slo.tbt_ms)
        if not composer.tokens:
            if running:
                composer.add(running[0], _least(running[0], view))
            elif first and composer.free_slots > 0:
                composer.admit(first[0], 1)
        return composer.plan()


def _least(request: Candidate, view: View) -> int:
    """The fewest tokens that get a request any further; a decode step is not divided."""
    return min(request.tokens, view.max_tokens) if request.decode else 1
