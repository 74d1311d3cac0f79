"""Pure decisions: a view of the engine in, a plan out. No clock, no vLLM, no tensors."""
