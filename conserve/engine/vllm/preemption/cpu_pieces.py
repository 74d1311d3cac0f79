"""Models compiled in pieces on a CPU too, as vLLM compiles them for GPUs, so that rows can leave between these.

vLLM's CPU platform makes one graph of a model, which calls attention within: rows could only abandon a whole
iteration. The platform's check of the configuration is let run; then the mode that it took away is put back. What
follows in vLLM is the same as for a GPU, but for one pass over inductor's graphs.
"""

from __future__ import annotations

import functools
from typing import Any

from conserve.engine.vllm.settings import WORKER

BACKEND = "inductor"


def split_on_cpu() -> None:
    """Have models compiled in pieces for our worker, where vLLM's own choice would be one graph.

    `--compilation-config '{"mode": 2}'` names that graph and gets it.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if current_platform.is_cpu() and not hasattr(platform.check_and_update_config, "__wrapped__"):
        platform.check_and_update_config = staticmethod(in_pieces(platform.check_and_update_config))


def in_pieces(check: Any) -> Any:
    """Wrap the platform's check of a configuration."""
    from vllm.config import CompilationMode

    @functools.wraps(check)
    def checked(config: Any) -> None:
        compilation = config.compilation_config
        by_default = compilation.mode == CompilationMode.VLLM_COMPILE
        check(config)
        # No graph is made without compilation, nor with LoRA.
        is_graph = compilation.mode == CompilationMode.DYNAMO_TRACE_ONCE
        if by_default and is_graph and config.parallel_config.worker_cls == WORKER:
            compilation.mode, compilation.backend = CompilationMode.VLLM_COMPILE, BACKEND
            compilation.compile_sizes = []  # vLLM sets them with the sizes of CUDA graphs

    return checked


def leave_gpu_pass_out() -> None:
    """Leave out the one pass over inductor's graphs that names operators of GPUs alone."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass

        FixFunctionalizationPass.__call__ = lambda self, graph: None
