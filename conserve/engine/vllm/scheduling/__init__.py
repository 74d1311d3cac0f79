"""vLLM's scheduler with a policy: observe, plan, apply."""
