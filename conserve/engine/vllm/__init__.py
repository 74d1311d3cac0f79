"""The embedded vLLM engine; nothing outside this package imports vLLM or torch."""
