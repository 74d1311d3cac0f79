"""The baseline of today: vLLM's own priority scheduling with chunked prefill."""

from conserve.engine.policy.plan import Plan
from conserve.engine.policy.view import View


class Priority:
    """Offline requests wait behind online ones and are the first to lose their memory; no SLO is known."""

    decides = False
    holds_offline = False
    spares_offline = False

    def plan(self, view: View) -> Plan | None:
        """Leave it to vLLM."""
        return None
