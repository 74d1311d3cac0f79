"""Rows that left: what they keep, what was lost, and when they may stay."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conserve.engine.runtime.leavers import SHELTER_AFTER, SHRINK_AFTER, Leavers

LAYERS = 30


def leave(leavers: Leavers, chunk: int, layer: int) -> Any:
    return leavers.left("row", chunk, layer=layer, layers_run=layer or 10, layers=LAYERS)


def test_a_row_that_goes_on_loses_nothing() -> None:
    leavers = Leavers()
    assert [leave(leavers, 2048, layer).tokens for layer in (6, 12, 18, 24, 29)] == [0] * 5
    assert leavers.chunk("row") == 2048
    assert not leavers.any_sheltered()


def test_a_row_that_begins_anew_loses_what_it_had_computed() -> None:
    lost = leave(Leavers(), 90, 0)
    assert (lost.tokens, lost.worth) == (90, 30)


def test_an_iteration_that_rows_left_is_counted_with_what_they_lost() -> None:
    from conserve.engine.vllm.iteration import IterationOutcome
    from conserve.engine.vllm.preemption.leave_counts import LeaveCounts

    counts = LeaveCounts()
    rows = [(SimpleNamespace(request_id="row"), 90)]
    for left in ({"row"}, {"row", "live"}):
        iteration: Any = SimpleNamespace(left=left, tokens={"row": 90, "live": 1}, rows=rows, raised_at=0.0)
        counts.left(iteration, IterationOutcome(layers_run=10))
        counts.lost(leave(Leavers(), 90, 0))
    said = counts.report()
    assert said.pop("reaction_ms").keys() == {"p50", "p99"}
    assert said == {
        "iterations_left": 2,
        "abandoned": 1,
        "rows": 3,
        "layers_run": 20,
        "refused": 0,
        "tokens_redone": 180,
        "tokens_wasted": 60.0,
        "live_tokens_recomputed": 1,
    }


def test_a_row_that_gets_no_further_is_cut_down_and_then_sheltered() -> None:
    leavers = Leavers()
    chunks = []
    while not leavers.is_sheltered("row"):
        leave(leavers, leavers.chunk("row") or 800, 3)
        chunks.append(leavers.chunk("row"))
    assert len(chunks) == SHELTER_AFTER
    assert chunks[: SHRINK_AFTER - 1] == [800] * (SHRINK_AFTER - 1)
    assert chunks[SHRINK_AFTER - 1 :] == [400, 200, 100, 50, 25][: SHELTER_AFTER - SHRINK_AFTER + 1]
    leavers.computed({"row": 25, "another": 7})
    assert not leavers.any_sheltered()
    assert leavers.chunk("row") == 775, "the rest of what it keeps"
    leavers.computed({"row": 775})
    assert leavers.chunk("row") is None


def test_a_row_that_leaves_a_shorter_chunk_further_on_keeps_the_rest_where_it_was() -> None:
    leavers = Leavers()
    leave(leavers, 200, 6)
    assert leave(leavers, 20, 12).tokens == 0
    assert leavers.chunk("row") == 20
    assert leave(leavers, 5, 20).tokens == 0
    assert leavers.chunk("row") == 5
    leavers.computed({"row": 5})
    assert leavers.chunk("row") == 15, "of the 20"
    leavers.computed({"row": 15})
    assert leavers.chunk("row") == 180, "of the 200"
    assert leavers.evicted("row", LAYERS) == (180, 36)


def test_a_row_that_leaves_before_it_has_joined_keeps_what_it_has() -> None:
    leavers = Leavers()
    leave(leavers, 200, 6)
    assert leave(leavers, 20, 6).tokens == 0
    assert leavers.chunk("row") == 200


def test_a_row_that_falls_back_has_lost_all_it_kept() -> None:
    leavers = Leavers()
    leave(leavers, 200, 6)
    leave(leavers, 20, 12)
    assert leave(leavers, 50, 3) == (200, 180 * 6 / 30 + 20 * 12 / 30)
    assert leavers.chunk("row") == 50


def test_memory_that_is_gone_takes_the_layers_along_once() -> None:
    leavers = Leavers()
    leave(leavers, 60, 15)
    assert leavers.evicted("row", LAYERS) == (60, 30)
    assert leavers.evicted("row", LAYERS) == (0, 0)
    assert leavers.evicted("another", LAYERS).worth == 0


class Model:
    """Layers that are called like some of vLLM's: positions and a scale that each gets whole, and a residual."""

    def __init__(self, rows: Any, layers: int) -> None:
        self.rows, self.layers = rows, layers

    def __call__(self, positions: Any, hidden: Any, scale: Any) -> Any:
        residual = None
        for index in range(self.layers):
            last = index == self.layers - 1
            args = (positions, hidden, residual)
            if self.rows is not None and self.rows.busy:
                hidden, residual = self.rows.run(index, last, self.layer, args, {"scale": scale})
            else:
                hidden, residual = self.layer(*args, scale=scale)
        return hidden

    @staticmethod
    def layer(positions: Any, hidden: Any, residual: Any, *, scale: Any) -> Any:
        return hidden * scale + positions[:, None], None


class Passes:
    """Passes of four layers over rows with so many tokens each, which leave when the test says."""

    def __init__(self, lengths: Mapping[str, int], leave_order: Sequence[str]) -> None:
        import torch

        from conserve.engine.vllm.iteration import Stamp
        from conserve.engine.vllm.preemption.rows import RunnerRows
        from conserve.engine.vllm.preemption.runner_v1 import V1Runner
        from conserve.engine.vllm.preemption.safepoints import Safepoints

        names, total = list(lengths), sum(lengths.values())
        runner = SimpleNamespace(
            attn_groups=[],
            maybe_get_kv_connector_output=None,
            device=torch.device("cpu"),
            query_start_loc=SimpleNamespace(np=np.cumsum([0, *lengths.values()])),
            discard_request_mask=SimpleNamespace(np=np.zeros(len(names), bool)),
            num_prompt_logprobs={},
            input_batch=SimpleNamespace(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                num_computed_tokens_cpu=np.zeros(len(names), int),
                num_reqs=len(names),
                generators={},
            ),
        )
        self._lengths = lengths
        self._orders = Orders()
        self._safepoints = Safepoints(self._orders, 4)
        self.rows = RunnerRows(V1Runner(runner), self._safepoints)
        self._model = Model(self.rows, 4)
        self._inputs = torch.arange(total), torch.randn(total, 5), torch.rand(total, 1)
        self.wanted = Model(None, 4)(*self._inputs)
        self._output = SimpleNamespace(
            finished_req_ids=set(),
            preempted_req_ids=None,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
            num_scheduled_tokens=lengths,
            total_num_scheduled_tokens=total,
        )
        self._stamp = Stamp(iteration=1, flag="", rows=leave_order, every=1)

    def once(self, at: dict[int, int]) -> Any:
        """Result of a pass; `at` says by layer how many rows are told to leave before it."""
        self._orders.at, self._orders.layer = at, -1
        self.rows.begin(self._output, watched=True)
        self._safepoints.arm(self._stamp)
        try:
            return self._model(*self._inputs)
        finally:
            self._safepoints.disarm()
            self.rows.end(self._lengths)


class Orders:
    """Says at each layer how many rows are to leave."""

    flag_readable = True

    def __init__(self) -> None:
        self.at: dict[int, int] = {}
        self.layer = -1

    def word(self, stamp: Any) -> None:
        """They have to be asked for."""

    def rows_ordered(self, stamp: Any) -> int:
        self.layer += 1
        return self.at.get(self.layer, 0)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> type[Passes]:
    from conserve.engine.vllm.preemption import rows

    monkeypatch.setattr(rows.RunnerRows, "_share", lambda *_: None)
    return Passes


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_inputs_that_every_layer_gets_whole_are_cut_for_each(passes: type[Passes]) -> None:
    import torch

    from conserve.engine.runtime.safepoint import ALL_ROWS
    from conserve.engine.vllm.preemption.safepoints import Abandoned

    under = passes({"a": 3, "b": 2, "c": 4}, ["c", "a", "b"])
    some = under.once({1: 1, 3: 2})  # c leaves before layer 1, a before layer 3
    assert under.rows.left == {"a", "c"}
    assert torch.equal(some[3:5], under.wanted[3:5])
    with pytest.raises(Abandoned):
        under.once({2: ALL_ROWS})  # at a layer where c has joined and a has not
    assert under.rows.suspended == {"a": 3, "b": 2, "c": 2}
    assert torch.equal(under.once({}), under.wanted)  # all go on where they left
    assert under.rows.suspended == {}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_decode_steps_leave_in_one_copy_and_a_prompt_in_its_own(passes: type[Passes]) -> None:
    import torch

    from conserve.engine.runtime.safepoint import ALL_ROWS
    from conserve.engine.vllm.preemption.safepoints import Abandoned

    under = passes({"a": 1, "prompt": 4, "b": 1, "c": 1}, ["prompt", "c", "b", "a"])
    some = under.once({1: 1, 2: 3})  # the prompt, then b and c of those that are left
    assert under.rows.suspended == {"prompt": 1, "b": 2, "c": 2}
    assert torch.equal(some[0], under.wanted[0])
    with pytest.raises(Abandoned):
        under.once({3: ALL_ROWS})
    memory = {}
    for name, parts in under.rows._suspended.items():
        hidden = parts[0].inputs[1]
        assert len(hidden) == parts[0].tokens
        memory[name] = (hidden.untyped_storage().data_ptr(), hidden.untyped_storage().nbytes())
    assert memory["a"] == memory["b"] == memory["c"]
    assert memory["a"][1] == 3 * 5 * 4  # three tokens of five numbers of four bytes
    assert memory["prompt"][1] == 4 * 5 * 4
    assert torch.equal(under.once({}), under.wanted)
    assert under.rows.suspended == {}
