"""Iterations beside which nothing is copied: the connector costs them next to nothing, and loses no report."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.warned import OF_VLLM

if TYPE_CHECKING:
    from conserve.engine.vllm.checkpoint.connector import CheckpointConnector
    from conserve.engine.vllm.checkpoint.transfers import Transfers

pytestmark = [*OF_VLLM, pytest.mark.engine]
BLOCKS, SIZE = 8, 16  # blocks of the device and of host memory, numbers in a block of a layer


@pytest.fixture
def worker() -> Iterator[CheckpointConnector]:
    """The worker's half over caches of two layers, whose blocks hold their own number."""
    from conserve.engine.vllm.checkpoint.connector import CheckpointConnector
    from conserve.engine.vllm.checkpoint.copies import Copies

    made: Any = CheckpointConnector.__new__(CheckpointConnector)
    made._connector_metadata, made.checkpoints, made._working = None, None, None
    made.copies = copies = Copies(None, None, 0)
    copies.num_cpu_blocks = BLOCKS
    copies.gpu_kv_caches = {name: numbers() for name in ("0", "1")}
    copies._init_cpu_mode(copies.gpu_kv_caches, 2 * 4 * SIZE, torch.device("cpu"))
    yield made
    made.shutdown()


def numbers() -> torch.Tensor:
    return torch.arange(BLOCKS, dtype=torch.float32).unsqueeze(1).repeat(1, SIZE)


def iteration(worker: CheckpointConnector, transfers: Transfers) -> tuple[Any, Any]:
    """Make the calls that vLLM makes around an iteration; returns the transfers that have ended, and the report."""
    worker.bind_connector_metadata(pickle.loads(pickle.dumps(transfers)))
    worker.start_load_kv(None)
    worker.wait_for_save()
    told = worker.get_transfer_results(set()), worker.build_connector_worker_meta()
    worker.clear_connector_metadata()
    return told


def await_copies(worker: CheckpointConnector) -> None:
    """Wait until everything that was queued is copied."""
    assert worker.copies is not None
    worker.copies._backend.thread.copy([], [], is_store=True).synchronize()


def save(event: int, *blocks: int) -> Transfers:
    from conserve.engine.vllm.checkpoint.transfers import Transfers

    return Transfers(store_event=event, store_gpu_blocks=[*blocks], store_cpu_blocks=[*blocks])


def test_a_message_without_copies_is_short_and_means_the_same() -> None:
    from conserve.engine.vllm.checkpoint.transfers import Transfers

    full = pickle.dumps(save(1, 2, 3))
    assert len(pickle.dumps(Transfers())) < len(full) / 2
    assert pickle.loads(pickle.dumps(Transfers())) == Transfers()
    assert pickle.loads(full) == save(1, 2, 3)
    waits = Transfers(load_event_to_reqs={3: ["row"]})
    assert pickle.loads(pickle.dumps(waits)) == waits


def test_saves_that_end_while_nothing_new_is_copied_are_reported_once(worker: CheckpointConnector) -> None:
    from conserve.engine.vllm.checkpoint.transfers import Transfers

    assert worker.copies is not None
    assert worker.copies.rests
    reports = [iteration(worker, save(1, 0, 5))[1]]
    await_copies(worker)
    reports += [iteration(worker, Transfers())[1] for _ in range(3)]
    assert [one.completed_store_events for one in reports if one is not None] == [{1: 1}]
    assert worker.copies.rests


def test_a_row_is_restored_while_nothing_new_is_copied(worker: CheckpointConnector) -> None:
    from conserve.engine.vllm.checkpoint.transfers import Transfers

    assert worker.copies is not None
    awaited = {2: ["row"]}
    for host in worker.copies.cpu_kv_caches.values():
        host[5] = 50
    load = Transfers(load_event=2, load_gpu_blocks=[1], load_cpu_blocks=[5], load_event_to_reqs=awaited)
    load.load_rows = ["row"]
    restored = [iteration(worker, load)[0].finished_recving]
    await_copies(worker)
    restored += [iteration(worker, Transfers(load_event_to_reqs=awaited))[0].finished_recving for _ in "12"]
    assert [names for names in restored if names] == [{"row"}]
    caches = worker.copies.gpu_kv_caches
    assert [float(cache[1][0]) for cache in caches.values()] == [50.0, 50.0]


def test_no_layer_asks_for_its_kv(worker: CheckpointConnector) -> None:
    """Each call would go through vLLM's context of the iteration, once a layer and a step."""
    from conserve.engine.vllm.checkpoint.transfers import Transfers

    for transfers in (Transfers(), save(1, 2)):
        worker.bind_connector_metadata(transfers)
        assert not worker.has_connector_metadata()
        worker.clear_connector_metadata()


def test_at_rest_the_copies_are_not_asked(
    worker: CheckpointConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    from conserve.engine.vllm.checkpoint.transfers import Transfers

    asked: list[str] = []
    for name in ("bind_connector_metadata", "start_load_kv", "wait_for_save", "results"):
        monkeypatch.setattr(worker.copies, name, lambda *_, name=name: asked.append(name))
    monkeypatch.setattr(worker.copies, "build_connector_worker_meta", lambda: asked.append("report"))
    found, report = iteration(worker, Transfers())
    assert not asked
    assert report is None
    assert (found.finished_sending, found.finished_recving, found.failed_recving) == (set(), set(), set())


def test_a_scheduler_with_nothing_to_copy_sends_the_short_message() -> None:
    from conserve.engine.runtime.copy_budget import BlockMs
    from conserve.engine.vllm.checkpoint.blocks import NONE, Checkpoints

    saves = Checkpoints("adaptive", host_blocks=4, block_tokens=16, block_ms=BlockMs(1.0, 1.0))
    pool: Any = SimpleNamespace(num_gpu_blocks=100, get_num_free_blocks=lambda: 90)
    saves.bind(pool, lambda name: [])
    assert saves.transfers() is NONE
    assert NONE.none
    assert not save(1, 2).none
