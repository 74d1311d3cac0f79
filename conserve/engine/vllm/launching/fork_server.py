"""Forks the engine's processes off one that has imported vLLM, instead of importing vLLM in each of them.

Importing vLLM takes 11 s of processor time, and an engine has three processes. On a CPU vLLM spawns core and
worker one after the other. Here both are forked off Python's fork server, which imports while this process does.

Libraries read their variables while they are loaded: OMP_NUM_THREADS, GOMP_CPU_AFFINITY, LD_PRELOAD. A process is
forked only if the fork server was started with the variables that vLLM gives it; any other process is spawned.
To be early, the fork server starts with the variables of the last such start, and again if they were wrong.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Hashable, Mapping
from multiprocessing import forkserver, popen_forkserver, popen_spawn_posix, reduction, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess, get_spawning_popen
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conserve.engine.runtime.start_cache import keep, kept_in
from conserve.engine.vllm.compat.installed import installed_engine
from conserve.engine.vllm.launching.watchdog import Watchdog
from conserve.variables import FORK_SERVER

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger(__name__)
IMPORTED = "conserve.engine.vllm.launching.imported"
OFF, KEEP = "0", "keep"  # values of FORK_SERVER: spawn as vLLM does; stay for the next engine of this process
# Prefixes of variables that no library reads while it is loaded, and one that only the fork server has.
READ_LATER = ("CONSERVE_", "PYTEST_", "XDG_CONFIG_HOME", "LINES", "COLUMNS", "PYTHONSAFEPATH")
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")  # in names of variables that are not remembered
USERS = (
    "vllm.utils.system_utils",
    "vllm.v1.engine.utils",
    "vllm.v1.executor.multiproc_executor",
)  # vLLM's modules that start processes, by `get_mp_context`
CORES = ("VLLM_CPU", "OMP_", "GOMP_", "KMP_")  # variables that decide which cores compute

Environment = Mapping[str, str]
Changes = dict[str, str | None]  # variable to its new value, or None where it is removed


class ForkServer:
    """The fork server of this process, or the one that this process was forked off."""

    def __init__(self) -> None:
        self.environment: Environment | None = None  # that it was started with; None: there is none
        self.fits: tuple[Environment, ...] = ()  # of the processes that may be forked
        self.users: set[Hashable] = set()  # engines that start or run
        self.lock = threading.RLock()
        self._pid = 0
        self._watchdog: Watchdog | None = None

    def start(self, environment: Environment) -> None:
        """Start the fork server. Where that fails, processes are spawned."""
        self.stop()
        try:
            self._pid = launch(environment)
            self._watchdog = Watchdog(self._pid)
        except (OSError, ValueError) as error:
            log.warning("the engine starts more slowly, as its processes cannot be forked: %s", error)
            self.stop()
            return
        atexit.register(self.stop)
        self.environment = environment

    def stop(self) -> None:
        """End the fork server. Processes that were forked off it would be taken for dead."""
        atexit.unregister(self.stop)
        try:
            if self._pid:
                os.kill(self._pid, signal.SIGKILL)  # it may be importing
                pythons_server()._stop()
            if self._watchdog is not None:
                self._watchdog.dismiss()
        except OSError as error:  # it has ended already
            log.debug("the fork server: %s", error)
        finally:
            self.environment, self.fits, self._pid, self._watchdog = None, (), 0, None

    @property
    def in_use(self) -> bool:
        """True if a process forked by this one runs, or other engines start."""
        children = multiprocessing.active_children()
        return len(self.users) > 1 or any(isinstance(child, ForkServerProcess) for child in children)

    @property
    def is_another(self) -> bool:
        """True if Python has started another one, in the place of one that ended."""
        return self._pid != (pythons_server()._forkserver_pid or 0)

    @property
    def allowed(self) -> bool:
        """True on the CPU build, where vLLM spawns, if neither the user nor another fork server is against it."""
        engine = installed_engine()
        if engine is None or not engine.computes_on_cpu:
            return False
        others = self.environment is None and pythons_server()._forkserver_pid is not None
        return os.environ.get(FORK_SERVER) != OFF and not others


SERVER = ForkServer()
_before: Environment = {}  # this process's variables when the fork server could first be started


def pythons_server() -> Any:
    """Python's fork server, of which a process has one."""
    return forkserver._forkserver


def launch(environment: Environment) -> int:
    """Start Python's fork server; its process id. The terminal's Ctrl-C does not reach what is forked off it.

    Python 3.11 would take modules from the current folder first.
    """
    own = dict(os.environ)
    resource_tracker.ensure_running()  # its start would let SIGINT through again
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    kept = {name: value for name, value in own.items() if name.startswith(READ_LATER)}
    try:
        replace_environment({**kept, **environment, "PYTHONSAFEPATH": "1"})
        forkserver.set_forkserver_preload([IMPORTED])
        forkserver.ensure_running()
    finally:
        replace_environment(own)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return int(pythons_server()._forkserver_pid)


def start_early(user: Hashable) -> None:
    """Start the fork server beside this process's own imports, if an earlier start told its variables.

    `user` is the engine that starts, until it is released.
    """
    global _before
    with SERVER.lock:
        if not SERVER.allowed:
            return
        SERVER.users.add(user)
        _before = variables()
        changes = recalled() if SERVER.environment is None else None
        if changes is not None:
            SERVER.start(changed(_before, changes))


def prepare(config: VllmConfig) -> None:
    """Have vLLM fork the processes of this engine; call it when the configuration is final."""
    if config.parallel_config.data_parallel_size > 1:  # each engine has variables of its own
        return
    with SERVER.lock:
        if not SERVER.allowed:
            return
        own, computing = variables(), workers_environment(config)
        if SERVER.environment != computing or SERVER.is_another:
            if SERVER.in_use:
                return
            SERVER.start(computing)
            remember(differences(_before, computing))
        if SERVER.environment is not None:
            SERVER.fits = (own, computing)
            adopt()


def release(user: Hashable) -> None:
    """End the fork server when an engine was closed, unless another uses it or the user keeps it."""
    with SERVER.lock:
        SERVER.users.discard(user)
        if os.environ.get(FORK_SERVER) != KEEP and not SERVER.users and not SERVER.in_use:
            SERVER.stop()


def wait_until_idle() -> None:
    """Wait for the end of the fork server's imports, beside which no speed can be measured."""
    if SERVER.environment is not None:
        answered = multiprocessing.get_context("forkserver").Process(target=bool)
        answered.start()
        answered.join()


def variables() -> Environment:
    """The variables of this process that a library may read while it is loaded."""
    return {name: value for name, value in os.environ.items() if not name.startswith(READ_LATER)}


def workers_environment(config: VllmConfig) -> Environment:
    """The environment that vLLM gives the first worker."""
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    with OMPProcessManager(config).configure_omp_envs(rank=0, local_rank=0):
        return variables()


def adopt() -> None:
    """Make vLLM start its processes in our context."""
    for name in USERS:
        module = sys.modules.get(name)
        if module is not None:
            setattr(module, "get_mp_context", lambda: CONTEXT)  # noqa: B010 - mypy knows no such attribute


class Forked(ForkServerProcess):
    """A process that is forked if the fork server has its environment, else spawned."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802 - its name in multiprocessing
        if variables() in SERVER.fits:
            try:
                return popen_forkserver.Popen(process_obj)
            except (OSError, EOFError) as error:
                log.warning("the fork server is gone (%r); the engine's process is spawned", error)
                SERVER.fits = ()
        return popen_spawn_posix.Popen(process_obj)

    def __getstate__(self) -> dict[str, Any]:
        if not isinstance(get_spawning_popen(), popen_forkserver.Popen):
            return self.__dict__
        # First, so that they are restored before vLLM's objects are unpickled.
        return {"_surroundings": Surroundings(), **self.__dict__}


class ForkContext(ForkServerContext):
    """The fork server's context, whose processes take their surroundings along."""

    Process = Forked


CONTEXT = ForkContext()


class Surroundings:
    """Variables, outputs and signals of a starter. A spawned process inherits them, a forked one is given them."""

    def __reduce__(self) -> tuple[Any, ...]:
        outputs = [reduction.DupFd(number) for number in (1, 2)]
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        key = getattr(pythons_server(), "_forkserver_authkey", None)  # of Python 3.14
        return restore, (dict(os.environ), outputs, sorted(blocked), key)


def restore(
    environment: Environment, outputs: list[Any], blocked: list[signal.Signals], key: bytes | None
) -> Surroundings:
    """Take over variables, outputs and signals, and what lets this process ask the fork server."""
    for number, output in enumerate(outputs, start=1):
        os.dup2(output.detach(), number)
    replace_environment(environment)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if key is not None:
        pythons_server()._forkserver_authkey = key
    if IMPORTED in sys.modules:
        join(sys.modules[IMPORTED])
    return Surroundings()


def join(imported: Any) -> None:
    """Be a process of this fork server: fork others off it, and compute where OpenMP was bound to, if this does."""
    # Python would start another fork server here, since this one is no child of this process.
    pythons_server().ensure_running = lambda: None
    SERVER.environment, SERVER.fits = imported.ENVIRONMENT, (imported.ENVIRONMENT,)
    if variables() == imported.ENVIRONMENT:
        os.sched_setaffinity(0, imported.BOUND_TO)


def replace_environment(wanted: Environment) -> None:
    """Make the variables of this process these."""
    for name, value in differences(dict(os.environ), wanted).items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def differences(before: Environment, after: Environment) -> Changes:
    """Variables that were set, changed or removed."""
    return {name: after.get(name) for name in {*before, *after} if before.get(name) != after.get(name)}


def changed(environment: Environment, changes: Changes) -> Environment:
    """The environment after these changes."""
    merged = {**environment, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def recalled() -> Changes | None:
    """The changes that the last such start made to the variables; None if none is known."""
    return kept_in(changes_file(), type_=Changes).get(kind_of_start())


def remember(changes: Changes) -> None:
    """Keep the changes. If the folder cannot be written, the next start begins to fork later."""
    kept = {name: value for name, value in changes.items() if not any(word in name for word in SECRET)}
    keep(changes_file(), kind_of_start(), kept, type_=Changes)


def kind_of_start() -> str:
    """The installed libraries, and what was said about the cores before the start."""
    said = [f"{name}={value}" for name, value in sorted(_before.items()) if name.startswith(CORES)]
    return " ".join([sys.prefix, *(installed_engine() or ()), *said])


def changes_file() -> Path:
    """File of the remembered changes, shared by all stores of the user."""
    from platformdirs import user_cache_path

    return user_cache_path("conserve") / "fork-server.json"
