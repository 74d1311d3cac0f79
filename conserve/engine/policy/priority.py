"""Baseline of today: vLLM's own priority scheduling with chunked prefill."""

from conserve.engine.policy.plan import Plan, Traits
from conserve.engine.policy.view import View


class Priority:
    """Offline requests are scheduled after online ones and evicted first; the SLO is not used."""

    traits = Traits(decides=False, knows_slo=False)

    def plan(self, view: View) -> Plan | None:
        """Leave the iteration to vLLM."""
        return None
