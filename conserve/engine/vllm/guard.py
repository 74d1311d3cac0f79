"""A former place of `conserve.vllm.Guard`, which flags of vLLM may name for one more release."""

from conserve.engine.vllm import former

__getattr__ = former(__name__, {"Guard": "Guard"})
