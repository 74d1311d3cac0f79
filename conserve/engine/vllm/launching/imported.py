"""Imports what core and worker import, once for all of them: the fork server runs this, then forks them off."""

import gc
import importlib
import os

from conserve.engine.vllm.launching.fork_server import adopt, variables

MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.structured_output",
    "vllm.model_executor.model_loader",
    "conserve.engine.vllm.scheduling.scheduler",
    "conserve.engine.vllm.preemption.worker",
    "conserve.engine.vllm.checkpoint.connector",
)

# Read before anything is imported: the libraries' own variables, and the core that OpenMP's loading bound this to.
ENVIRONMENT = variables()
BOUND_TO = frozenset(os.sched_getaffinity(0))


def main() -> None:
    """Import the modules; a process that cannot import one of them itself will say why."""
    name_process()
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception:
            return
    adopt()
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))  # each copy of OpenMP bound it once more
    gc.freeze()  # forks share its memory for longer


def name_process() -> None:
    """Name this process, as vLLM names its own; the names of forks can be set only if this was done first."""
    try:
        from setproctitle import setproctitle
    except ImportError:
        return
    setproctitle("VLLM::ForkServer")


main()
