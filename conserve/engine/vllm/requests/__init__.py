"""Translation of OpenAI bodies into vLLM's requests and back into answers, continued from saved tokens."""
