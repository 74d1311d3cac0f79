"""Distribution of tests over the workers of a run, and their order."""

import functools
import re
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

IMPORT_VLLM = frozenset(
    {
        "test_checkpoints",
        "test_dry_run",
        "test_internals",
        "test_interrupted_import",
        "test_leavers",
        "test_live_classes",
        "test_preemption",
        "test_priorities",
        "test_privileges",
        "test_request_fault",
        "test_surface",
        "test_telemetry",
    }
)
"""Modules outside of `integration` whose tests import vLLM or torch in their own process."""

REPOSITORY = Path(__file__).parents[1]
COMMANDS = re.compile(r"tests\.commands|import commands|forks: Forks|sql\.(query|answer)")
"""Text of modules whose tests fork."""

SERVERS = re.compile(r"\b(Service|Ranks|EmbeddedEndpoint|subprocess\.(run|Popen))\(")
"""Text of modules of `integration` whose tests start vLLM's engine in processes of its own."""


class Together(LoadScopeScheduling):
    """Keeps tests that share an engine in one worker, and those that start engine processes one after the other.

    A fork of a process that has imported vLLM costs several times as much, and most commands fork. So the first
    worker takes the tests of engines first, and then those without commands; the others begin with commands.

    Not xdist's own groups, which pytest 9.2 passes over.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._turns: dict[WorkerController, list[str]] = {}
        """Kinds of tests that a worker has not found to be out."""
        self._waiting: dict[str, deque[str]] = {}
        """Scopes of each kind, in their order."""

    def _split_scope(self, nodeid: str) -> str:
        module, _, _ = nodeid.partition("::")
        if starts_servers(Path(module)):
            return "servers"
        if module.startswith("tests/integration/"):
            return nodeid.partition("[")[0].rpartition("::")[0]  # the class, or the module
        return nodeid

    def _assign_work_unit(self, node: WorkerController) -> None:
        if not self._waiting:
            self._waiting = {kind: deque(s for s in self.workqueue if kind_of(s) == kind) for kind in KINDS}
        turns = self._turns.setdefault(node, [*KINDS] if node is self.nodes[0] else [*reversed(KINDS)])
        while turns and not self._waiting[turns[0]]:
            turns.pop(0)
        if turns:
            self.workqueue.move_to_end(self._waiting[turns[0]].popleft(), last=False)
        super()._assign_work_unit(node)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0.0) -> None:
        """Forget a scope that is done: at each test all that a worker has are counted."""
        super().mark_test_complete(node, item_index, duration)
        scope = self._split_scope(self.registered_collections[node][item_index])
        if all(self.assigned_work[node][scope].values()):
            del self.assigned_work[node][scope]


@functools.cache
def starts_servers(module: Path) -> bool:
    """True for a module of `integration` whose text is that of `SERVERS`."""
    return module.parent.name == "integration" and bool(SERVERS.search((REPOSITORY / module).read_text()))


KINDS = ("engine", "plain", "command")


def kind_of(scope: str) -> str:
    """Kind of the tests of a scope, one of `KINDS`."""
    return "engine" if scope == "servers" else kind_of_module(scope.partition("::")[0])


@functools.cache
def kind_of_module(path: str) -> str:
    """Kind of a module's tests: that import vLLM in their process, that run commands, or neither."""
    module = Path(path)
    if module.parent.name == "integration" or module.stem in IMPORT_VLLM:
        return "engine"
    return "command" if COMMANDS.search((REPOSITORY / path).read_text()) else "plain"
