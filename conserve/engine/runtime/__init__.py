"""Parts of the engine that know memory and tensors but not vLLM."""
