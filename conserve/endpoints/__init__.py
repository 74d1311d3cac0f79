"""Endpoints: the protocol, an OpenAI-compatible HTTP server, and an in-memory fake.

The embedded vLLM engine is an endpoint too; it is in `conserve.engine.vllm.embedded`.
"""
