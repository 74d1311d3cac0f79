"""Where requests go: the `Endpoint` protocol, an OpenAI-compatible HTTP server, and an in-memory fake.

The embedded vLLM engine is an endpoint too; it lives in `conserve.engine.vllm.embedded`.
"""
