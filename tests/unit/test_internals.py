"""Everything that ConServe uses of vLLM is listed in `compat`, and everything listed is used.

The syntax trees of ConServe are walked beside those of the installed vLLM. Annotations, imports, assignments and
the names in `USUAL` tell whose an attribute is. An attribute of an object of vLLM is listed under its class, or
under one that this class inherits from or is inherited by. Where nothing tells whose it is, any listed attribute
of that name will do, and one whose name our classes, Python's or torch's have too is taken for theirs.

So these are not seen: an attribute of such a name on an object of which nothing is known; names that are put
together while the code runs; keywords of vLLM's functions (`calls.SIGNATURES` has some); dunder methods; what
vLLM's own classes inherit from other libraries. Two classes of one name count as one, such as `InputBatch` of
both model runners.
"""

import argparse
import ast
import asyncio
import collections
import gc
import importlib.util
import inspect
import logging
import multiprocessing.process
import queue
import random
import re
import subprocess
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from conserve.engine.vllm.compat import trial
from conserve.engine.vllm.compat.calls import HABITS
from conserve.engine.vllm.compat.classes import CLASSES
from conserve.engine.vllm.compat.internals import INTERNALS
from conserve.engine.vllm.compat.versions import DIFFERENCES
from tests.class_index import Index
from tests.known_names import OURS, VLLM
from tests.vllm_uses import Listed, Use, Walk

INSTALLED = importlib.util.find_spec("vllm")
pytestmark = pytest.mark.skipif(INSTALLED is None, reason="vLLM is not installed")

REPOSITORY = Path(__file__).parents[2]
NAMES = {name for part in INTERNALS.values() for one in part for name in trial.expanded(one)}
FORMER = {difference.instead for difference in DIFFERENCES if difference.instead}

READ = [  # besides the modules of listed names
    "config/**/*.py",
    "distributed/parallel_state.py",
    "outputs.py",
    "v1/attention/backend.py",
    "v1/core/**/*.py",
    "v1/engine/**/*.py",
    "v1/outputs.py",
    "v1/request.py",
    "v1/simple_kv_offload/*.py",
    "v1/worker/**/*.py",
]

USUAL = {  # variables and attributes that are called like this in all of our files -> their class
    "block": "KVCacheBlock",
    "common": "CommonAttentionMetadata",
    "config": "VllmConfig",
    "connector_output": "KVConnectorOutput",
    "core": "EngineCore",
    "engine": "AsyncLLM",
    "engine_client": "AsyncLLM",
    "kv_cache_config": "KVCacheConfig",
    "kv_cache_manager": "KVCacheManager",
    "llm": "AsyncLLM",
    "manager": "KVCacheManager",
    "params": "SamplingParams",
    "pool": "BlockPool",
    "request": "Request",
    "runner": "GPUModelRunner",
    "sampling_params": "SamplingParams",
    "scheduler": "Scheduler",
    "scheduler_output": "SchedulerOutput",
    "vllm_config": "VllmConfig",
    "worker": "Worker",
}

PYTHONS: list[Any] = [
    *(
        bytes,
        collections.defaultdict,
        collections.deque,
        dict,
        float,
        frozenset,
        int,
        list,
        memoryview,
        object,
    ),
    *(set, str, tuple, types.CodeType, types.FunctionType),
    *(argparse.ArgumentParser, argparse.Namespace, asyncio.AbstractEventLoop, asyncio.Event, asyncio.Queue),
    *(asyncio.Task, asyncio.Transport, inspect.Signature, logging.Logger, logging.StreamHandler()),
    *(multiprocessing.process.BaseProcess, Path, queue.Queue, random.Random, re.Match, re.Pattern),
    *(subprocess.Popen, threading.Event, threading.Thread),
]


def attributes_of_others() -> set[str]:
    """Names of attributes that objects of Python and of libraries have."""
    import httpx
    import numpy as np
    import starlette.requests
    import torch

    libraries = [httpx.Request, httpx.Response(200), np.ndarray, starlette.requests.Request, torch.Tensor]
    libraries += [torch.fx.Graph, torch.fx.GraphModule, torch.fx.Node, torch.nn.Linear(1, 1)]
    fields = {field for node in vars(ast).values() for field in getattr(node, "_fields", ())}
    return fields | {name for one in [*PYTHONS, *libraries] for name in dir(one)}


class Whole:
    """ConServe and the installed vLLM, parsed."""

    def __init__(self) -> None:
        assert INSTALLED is not None
        assert INSTALLED.origin is not None
        root = Path(INSTALLED.origin).parent
        self.index = Index()
        read = {path for pattern in READ for path in root.glob(pattern)}
        for path in sorted(read | set(filter(None, (module_of(root, name) for name in NAMES)))):
            self.index.add(path, VLLM)
        files = sorted((REPOSITORY / "conserve").rglob("*.py"))
        self.files = {path: self.index.add(path, OURS) for path in files}
        habits = {name for one in HABITS for name in trial.expanded(one) if re.fullmatch(r"[\w.]+", name)}
        self.listed = Listed(NAMES | FORMER, habits, self.index)
        self.common = frozenset(attributes_of_others() | self.index.members_of(OURS))
        self.usual = {variable: f"{VLLM}:{name}" for variable, name in USUAL.items()}

    def walk(self, path: str, tree: ast.Module) -> Walk:
        return Walk(path, self.index, self.common, self.usual).walk(tree)

    def unlisted(self, walk: Walk) -> list[Use]:
        return sorted(use for use in walk.uses if not self.listed.has(use))


def module_of(root: Path, name: str) -> Path | None:
    """The file that a full name is in, as far as its address tells."""
    words = name.split(".")[1:]
    folders = (root.joinpath(*words[:count]) for count in range(len(words), 0, -1))
    places = (place for folder in folders for place in (folder.with_suffix(".py"), folder / "__init__.py"))
    return next((place for place in places if place.is_file()), None)


@contextmanager
def without_collections() -> Iterator[None]:
    """Trees are kept: to look through them for garbage again and again takes as long as to read the files."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def whole() -> Whole:
    with without_collections():
        return Whole()


@pytest.fixture(scope="module")
def walks(whole: Whole) -> dict[str, Walk]:
    """All files that vLLM occurs in, walked."""
    names = {str(path.relative_to(REPOSITORY)): path for path in whole.files}
    return {
        name: whole.walk(name, whole.files[path])
        for name, path in names.items()
        if is_adapter(name) or VLLM in path.read_text()
    }


def is_adapter(name: str) -> bool:
    return name.startswith("conserve/engine/vllm/")


def test_whatever_is_used_of_vllm_is_listed(whole: Whole, walks: dict[str, Walk]) -> None:
    """Attributes are looked for in the adapter alone: the other rooms must not import vLLM."""
    outside = {name: walk for name, walk in walks.items() if "/compat/" not in name}
    found = [use for walk in outside.values() for use in whole.unlisted(walk)]
    unlisted = [str(use) for use in found if use.dotted or is_adapter(use.path)]
    assert not unlisted, "list in conserve/engine/vllm/compat/internals.py, with their use:\n" + "\n".join(
        unlisted
    )


def test_whatever_is_listed_is_used(walks: dict[str, Walk]) -> None:
    data = {
        f"conserve/engine/vllm/compat/{name}.py" for name in ("internals", "classes", "calls", "versions")
    }
    words = {word for name, walk in walks.items() if name not in data for word in walk.words}
    assert sorted(name for name in NAMES if name.rpartition(".")[2] not in words) == []


def test_every_listed_name_begins_with_a_module() -> None:
    """`conserve doctor` and the trial of another version import it, and find a class without its module nowhere."""
    assert [name for name in NAMES if importlib.util.find_spec(name.partition(".")[0]) is None] == []


def test_every_class_with_a_short_name_has_listed_attributes() -> None:
    homes = {name.rpartition(".")[0] for name in NAMES} | NAMES
    assert [f"{module}.{name}" for name, module in CLASSES.items() if f"{module}.{name}" not in homes] == []


HEAD = """
from typing import TYPE_CHECKING, Any
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request
"""

PLANTED = {
    "def f(scheduler: Any): scheduler.kv_cache_manager.take_events()": "KVCacheManager.take_events",
    "def f(r: Request): return r.trace_headers": "Request.trace_headers",
    "def f(scheduler): return [one.trace_headers for one in scheduler.running]": "Request.trace_headers",
    "def f(r: Request): r.client_index = 0": "Request.client_index",
    "def f(r: Request): return getattr(r, 'client_index', 0)": "Request.client_index",
    "def f(made: Any): made.evict_blocks(())": "evict_blocks",
    "def f(): return SamplingParams(top_k=1)": "SamplingParams.top_k",
    "def f(common, x): return common.replace(dcp_local_seq_lens=x)": "CommonAttentionMetadata.dcp_local_seq_lens",
    "class Synchronous:\n    def f(self): self.set_pause_state(1)": "Scheduler.set_pause_state",
    "class Synchronous:\n    def set_pause_state(self, *args): pass": "Scheduler.set_pause_state",
    "def f(scheduler):\n    pool = scheduler.kv_cache_manager.block_pool\n    pool.cached_block_hash_to_block": (
        "BlockPool.cached_block_hash_to_block"
    ),
    "def f():\n    from vllm.v1.core.sched.output import GrammarOutput": "vllm.v1.core.sched.output.GrammarOutput",
    "if TYPE_CHECKING:\n    from vllm.v1.core.block_pool import BlockHashToBlockMap": (
        "vllm.v1.core.block_pool.BlockHashToBlockMap"
    ),
    "import vllm.envs": "vllm.envs",
    "PLACE = 'vllm.v1.engine.core.DPEngineCoreProc'": "vllm.v1.engine.core.DPEngineCoreProc",
}


@pytest.mark.parametrize("source", PLANTED)
def test_a_use_that_is_planted_is_found(whole: Whole, source: str) -> None:
    (use,) = set(whole.unlisted(whole.walk("planted.py", ast.parse(HEAD + source))))
    home, _, name = PLANTED[source].rpartition(".")
    if use.dotted:
        assert use.name == PLANTED[source]
    else:
        assert use.name == name
        assert f"{VLLM}:{home}" in use.classes if home else not use.classes


@pytest.mark.parametrize(
    "source",
    [
        "def f(r: Request): return r.num_tokens",
        "def f(scheduler: Any): return scheduler.arrival_monitor.may_leave_next",
        "def f(names: list[str]): names.append(names.pop())",
        "import torch\ndef f(x: torch.Tensor): return x.to(torch.device('cpu')).sum()",
        "class Synchronous:\n    def g(self): return self.running[0].request_id",
        "import logging\nlog = logging.getLogger('vllm.conserve')",
    ],
)
def test_a_use_that_is_listed_or_not_of_vllm_is_none(whole: Whole, source: str) -> None:
    assert whole.unlisted(whole.walk("planted.py", ast.parse(HEAD + source))) == []
