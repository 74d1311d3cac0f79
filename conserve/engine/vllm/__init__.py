"""The adapter to vLLM; nothing outside this package and `conserve.vllm` imports vLLM or torch."""
