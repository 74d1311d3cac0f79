"""The baseline of throughput: offline requests wait behind online ones, and once they run they stay."""

from conserve.engine.policy.plan import Plan
from conserve.engine.policy.view import View


class NonPreemptive:
    """Conserve-2026 section 6.1: low priority without preemption."""

    decides = False
    holds_offline = False
    spares_offline = True

    def plan(self, view: View) -> Plan | None:
        """Leave it to vLLM, which then takes memory back from whoever was admitted last."""
        return None
