"""Warnings that tests pass over."""

import pytest

# SWIG's and torch's own, while vLLM is imported.
OF_VLLM = (
    pytest.mark.filterwarnings("ignore:builtin type [sS]wig.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
)
