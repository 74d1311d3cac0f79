"""KV copies on CUDA streams, which are played here: they are timed by the device, and fail one by one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.warned import OF_VLLM

if TYPE_CHECKING:
    from conserve.engine.vllm.checkpoint.copies import Copies

pytestmark = [*OF_VLLM, pytest.mark.engine]
BLOCK_MS = 2.0  # of the played device; a save takes twice as long
REFUSED = 13  # block that cannot be copied


class Stream:
    """A CUDA stream: the time at which all that was queued has ended."""

    def __init__(self) -> None:
        self.ms = 0.0


class Event:
    """A CUDA event, of a device whose time is past all that was queued."""

    def __init__(self, **_: object) -> None:
        self._ms: float | None = None

    def record(self, stream: Stream) -> None:
        self._ms = stream.ms

    def wait(self, stream: Stream) -> None:
        """Have the stream wait for computing, which takes its time."""
        stream.ms += 100.0

    def query(self) -> bool:
        return True  # as of an event that is not recorded

    def elapsed_time(self, end: Event) -> float:
        assert self._ms is not None
        assert end._ms is not None
        return end._ms - self._ms


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    """The worker's half of a device, whose copies are played."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.simple_kv_offload import copy_backend
    from vllm.v1.simple_kv_offload import worker as offloading

    from conserve.engine.vllm.checkpoint import streams
    from conserve.engine.vllm.checkpoint.copies import Copies

    def copied(sources: list[int], targets: list[int], params: tuple[Stream, float]) -> None:
        stream, block_ms = params
        if REFUSED in sources:
            raise RuntimeError("batch memcpy failed")
        stream.ms += block_ms * len(sources)

    def built(source: dict[str, str], *given: Any, **order: int) -> tuple[Stream, float]:
        return given[1], BLOCK_MS * (2 if source == {"device": ""} else 1)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(current_platform, "set_device", lambda device: None)
    monkeypatch.setattr(copy_backend, "build_params", built)
    monkeypatch.setattr(streams, "copy_blocks", copied)
    monkeypatch.setattr(offloading.SimpleCPUOffloadWorker, "_init_cpu_mode", pinned)
    made = Copies(None, None, 0)
    made.load_stream, made.store_stream = Stream(), Stream()
    made._init_cpu_mode({"device": ""}, 1, torch.device("meta"))
    yield made
    made.stop()


def pinned(worker: Any, caches: dict[str, Any], block_bytes: int, device: Any) -> None:
    """Set up host memory as vLLM does, with vLLM's copies."""
    from vllm.v1.simple_kv_offload.copy_backend import DmaCopyBackend

    worker.cpu_kv_caches = {"host": ""}
    worker._backend = DmaCopyBackend()
    worker._backend.init(caches, worker.cpu_kv_caches, device, worker.load_stream, worker.store_stream)


def made_by(copies: Copies, **transfers: Any) -> tuple[Any, Any]:
    """An iteration's copies, once all have ended: the restored rows and the report."""
    from conserve.engine.vllm.checkpoint.transfers import Transfers

    copies.bind_connector_metadata(Transfers(**transfers))
    copies.start_load_kv()
    copies.wait_for_save()
    for _, transfer in [*copies._load_events, *copies._store_events]:
        while not transfer.query():  # the thread has yet to queue it
            pass
    found = copies.results(set()), copies.build_connector_worker_meta()
    copies.clear_connector_metadata()
    return found


def save(event: int, *blocks: int) -> dict[str, Any]:
    return {"store_event": event, "store_gpu_blocks": [*blocks], "store_cpu_blocks": [*blocks]}


def load(event: int, *blocks: int) -> dict[str, Any]:
    rows = {"load_event_to_reqs": {event: ["row"]}, "load_rows": ["row"]}
    return {"load_event": event, "load_gpu_blocks": [*blocks], "load_cpu_blocks": [*blocks], **rows}


def test_copies_report_what_a_block_took_on_the_device(copies: Copies) -> None:
    """Without the computing that they wait for."""
    results, report = made_by(copies, **save(1, 0, 1, 2), **load(2, 3, 4))
    assert report.block_ms == (2 * BLOCK_MS, BLOCK_MS)
    assert report.completed_store_events == {1: 1}
    assert (results.finished_recving, results.failed_recving) == ({"row"}, set())
    _, report = made_by(copies, **save(3, 5))
    assert report.block_ms == (2 * BLOCK_MS, None)
    assert made_by(copies)[1] is None
    assert copies.rests


def test_a_stream_that_takes_nothing_any_more_fails_its_copies(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows are computed again; one that waited for the stream's event would wait for ever."""

    record = Event.record

    def refused(self: Event, stream: Stream) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("CUDA error")
        record(self, stream)

    monkeypatch.setattr(Event, "record", refused)
    results, report = made_by(copies, **save(1, 0), **load(2, 3))
    assert (report.completed_store_events, report.failed_stores) == ({1: 1}, {1})
    assert (results.finished_recving, results.failed_recving) == ({"row"}, {"row"})


def test_a_copy_that_fails_is_told_and_the_next_ones_are_made(copies: Copies) -> None:
    results, report = made_by(copies, **save(1, REFUSED), **load(2, REFUSED))
    assert (report.completed_store_events, report.failed_stores) == ({1: 1}, {1})
    assert report.block_ms == (None, None)
    assert (results.finished_recving, results.failed_recving) == ({"row"}, {"row"})
    results, report = made_by(copies, **save(3, 1), **load(4, 2))
    assert (report.completed_store_events, report.failed_stores) == ({3: 1}, set())
    assert report.block_ms == (2 * BLOCK_MS, BLOCK_MS)
    assert (results.finished_recving, results.failed_recving) == ({"row"}, set())
