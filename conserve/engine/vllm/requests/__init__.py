"""OpenAI bodies to vLLM's requests and back to answers, continued where they were cut."""
