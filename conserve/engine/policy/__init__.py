"""Pure decisions: a policy takes a view of the engine and returns a plan. No clock, no vLLM, no tensors."""
