"""Every iteration within a time limit, for batch runs that share their machine with other work."""

from collections.abc import Sequence
from itertools import chain, islice

from conserve.engine.policy.composer import Composer
from conserve.engine.policy.offline import serve_least, serve_offline
from conserve.engine.policy.plan import Plan, Traits
from conserve.engine.policy.view import Candidate, View


class Paced:
    """Treats all requests alike; the TBT of the SLO is the limit of each iteration."""

    traits = Traits(treats_alike=True)

    def plan(self, view: View) -> Plan:
        """Plan the tokens that fit into the limit, at least one."""
        composer = Composer(view)
        running: Sequence[Candidate] = [*view.online, *view.offline]
        waiting = chain(view.waiting_online, view.waiting_offline)
        first = list(islice(waiting, 1))
        running = serve_offline(composer, running, chain(first, waiting), view.slo.tbt_ms)
        serve_least(composer, running, first)
        return composer.plan()
