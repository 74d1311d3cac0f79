"""From OpenAI bodies to vLLM's requests and back to answers, continued from saved tokens."""
