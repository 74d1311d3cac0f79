"""vLLM's scheduler with a policy: look, plan, apply, settle."""
