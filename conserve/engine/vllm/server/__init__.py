"""vLLM's OpenAI server with ConServe's plug-in: routes, keys, metrics."""
