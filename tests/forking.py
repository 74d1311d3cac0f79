"""A program that has processes forked; it and they print what they are.

python -m tests.forking
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from conserve.engine.vllm.launching import fork_server

# The fork server imports this module in place of vLLM.
fork_server.IMPORTED = "tests.forking"
ENVIRONMENT = fork_server.variables()
BOUND_TO = frozenset(os.sched_getaffinity(0))
FORKS = "CONSERVE_FORKS"  # variable: id of the fork server


def show(name: str, *nested: str) -> None:
    """Print what this process has of its starter, after the same of nested ones."""
    for one in nested:
        run(one)
    said: dict[str, Any] = {
        "name": name,
        "forked": str(os.getppid()) == os.environ[FORKS],
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "blocks Ctrl-C": signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    }
    print(json.dumps(said), flush=True)
    print(f"complaint of {name}", file=sys.stderr, flush=True)


def run(*names: str) -> None:
    """Run a process, forked if it may be."""
    process = fork_server.CONTEXT.Process(target=show, args=names)
    process.start()
    process.join()


def main() -> None:
    """Run processes with one variable and another."""
    server = fork_server.SERVER
    os.environ.pop("OMP_NUM_THREADS", None)
    server.start({**fork_server.variables(), "OMP_NUM_THREADS": "3"})
    server.fits = (fork_server.variables(), server.environment or {})
    pid = fork_server.pythons_server()._forkserver_pid
    os.environ[FORKS] = str(pid)
    run("idle")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ["OMP_NUM_THREADS"] = "3"
    run("computing", "nested")
    os.environ["OMP_NUM_THREADS"] = "4"
    run("other")
    os.kill(pid, signal.SIGTERM)  # as to the whole group: it stays for those that it has forked
    server.fits = ()
    os.environ["OMP_NUM_THREADS"] = "3"
    run("orphan")
    fork_server.release("this program")
    print(json.dumps({"left": Path(f"/proc/{pid}").exists()}))


if __name__ == "__main__":
    main()
