"""Imports what core and worker import, once for all of them: the fork server runs this, then forks them off."""

import contextlib
import gc
import importlib
import logging
import os
import signal

from conserve.engine.vllm.launching.environment import quiet_warnings
from conserve.engine.vllm.launching.fork_server import adopt, variables

log = logging.getLogger(__name__)
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
    for number in (signal.SIGTERM, signal.SIGHUP):  # its processes would be taken for dead, and run on
        signal.signal(number, signal.SIG_IGN)
    quiet_warnings()
    name_process()
    try:
        for name in MODULES:
            importlib.import_module(name)
        adopt()
    except Exception as error:
        log.debug("not imported: %r", error)
    finally:
        with contextlib.suppress(OSError):  # each copy of OpenMP has bound it
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
        gc.freeze()  # forks share its memory for longer


def name_process() -> None:
    """Name this process, as vLLM names its own; the names of forks can be set only if this was done first."""
    try:
        from setproctitle import setproctitle
    except ImportError:
        return
    setproctitle("VLLM::ForkServer")


main()
