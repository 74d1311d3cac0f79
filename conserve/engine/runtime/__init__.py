"""Parts of the engine that handle memory, tensors and processes without vLLM."""
