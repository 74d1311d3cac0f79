"""lm-evaluation-harness and inspect_ai over the durable queue, by their own code."""
