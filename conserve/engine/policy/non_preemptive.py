"""Baseline for throughput: offline requests wait behind online ones, and once they run they stay."""

from conserve.engine.policy.plan import Plan, Traits
from conserve.engine.policy.view import View


class NonPreemptive:
    """Low priority without preemption, the baseline of conserve-2026 (section 6.1)."""

    traits = Traits(decides=False, spares_offline=True, knows_slo=False)

    def plan(self, view: View) -> Plan | None:
        """Leave the iteration to vLLM, which evicts the request that was admitted last."""
        return None
