"""Offline rows leave compiled passes between the pieces, and every answer is what it would have been."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest

from tests.integration.test_preemption import (
    BLOCK_BYTES,
    Rows,
    assert_usable,
    counts,
    mixed,
    offline_rows,
    storm,
)
from tests.tiny_models import LAYERS, OTHERS, build_tiny_model

# As in test_embedded_engine.py.
pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:builtin type [sS]wig.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


@pytest.fixture(scope="class")
def engine(
    six_layers: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """One start per class."""
    from tests.preempted_engine import compiled_in_pieces, started

    cache = tmp_path_factory.mktemp("compiled")
    flags = getattr(request.cls, "flags", {})
    with (
        compiled_in_pieces(cache),
        started(six_layers, enforce_eager=False, **flags) as engine,
    ):
        yield engine
        assert_usable(engine)


class TestPieces(Rows):
    """What holds between decoder layers holds between compiled pieces."""

    def test_the_engine_says_so(self, engine: Any) -> None:
        from vllm.config import CompilationMode

        from conserve.engine.vllm.preemption.pieces import Pieces

        assert engine.worker.vllm_config.compilation_config.mode == CompilationMode.VLLM_COMPILE
        assert isinstance(engine.worker._rows, Pieces)
        assert engine.layers == LAYERS
        asked = offline_rows(20)
        engine.undisturbed(asked)
        assert engine.preemptions.report()["rows_go_on"]

    def test_rows_lose_their_memory(self, engine: Any) -> None:
        storm(engine, 300)

    def test_passes_that_no_row_may_leave_run_as_vllm_wrote_them(
        self, engine: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from conserve.engine.vllm.preemption.pieces import Segments

        run, ran = Segments.run, list[int]()

        def counting(segments: Segments, index: int, variables: dict[str, Any]) -> None:
            ran.append(index)
            run(segments, index, variables)

        monkeypatch.setattr(Segments, "run", counting)
        rows = offline_rows(21)
        answers = engine.together([ask._replace(offline=False) for ask in rows])
        assert not ran
        engine.forget()
        assert engine.together(rows) == answers
        assert len(ran) == engine.layers + 1 + ran[LAYERS + 1 :].count(0) * (engine.layers + 1)
        engine.forget()


class TestLittleMemory:
    flags: ClassVar = {"kv_cache_memory_bytes": 18 * LAYERS * BLOCK_BYTES, "max_model_len": 512}

    def test_a_storm_of_preemptions(self, engine: Any) -> None:
        assert storm(engine, 300, kinds=16, longest=100, losing=0.0)


class Graph:
    """A piece as a CUDA graph has it: of certain sizes, with results in memory that the next pass overwrites."""

    def __init__(self, piece: Any) -> None:
        self.piece = piece
        self.replays = 0
        self._memory: dict[int, list[Any]] = {}

    def __call__(self, *args: Any) -> Any:
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        if context.cudagraph_runtime_mode == CUDAGraphMode.NONE:
            return self.piece(*args)
        size = context.batch_descriptor.num_tokens
        assert args[self.piece.sym_shape_indices[0]] == size, "a graph is of one number of tokens"
        self.replays += 1
        results = self.piece(*args)
        memory = self._memory.setdefault(size, [result.clone() for result in results])
        for place, result in zip(memory, results, strict=True):
            place.copy_(result)
        return tuple(memory)

    def overwrite(self) -> None:
        """The pass is over, and its memory others'."""
        for memory in self._memory.values():
            for place in memory:
                place.fill_(1e9 if place.is_floating_point() else 0)


class Graphs:
    """Has every pass of an engine padded to a size of graphs, as vLLM's model runner does on a GPU."""

    SIZE = 16

    def __init__(self) -> None:
        self.pieces: list[Graph] = []

    def wrapped(self, piece: Any, *_: Any) -> Graph:
        self.pieces.append(Graph(piece))
        return self.pieces[-1]

    def install(self, engine: Any) -> None:
        (stitched,) = engine.worker._stitched
        inner, arguments = stitched.run, engine.worker._rows._segments.names

        def padded(*args: Any) -> Any:
            import torch
            from vllm.config import CUDAGraphMode
            from vllm.forward_context import BatchDescriptor, get_forward_context

            layout = engine.worker._rows._layouts[0]
            given = dict(zip(arguments, args, strict=True))
            tokens = len(given[next(iter(layout.tensors))])
            size = -(-tokens // self.SIZE) * self.SIZE
            for name in layout.tensors:
                given[name] = torch.cat([given[name], given[name].new_zeros(size - tokens)])
            given.update(dict.fromkeys(layout.numbers, size))
            context = get_forward_context()
            context.cudagraph_runtime_mode = CUDAGraphMode.PIECEWISE
            context.batch_descriptor = BatchDescriptor(size)
            result = tuple(one[:tokens].clone() for one in inner(*given.values()))
            for piece in self.pieces:
                piece.overwrite()
            return result

        stitched.run = padded


class TestGraphs:
    """CUDA graphs of the pieces, played on a CPU: a pass leaves them where rows leave it."""

    @pytest.fixture(scope="class")
    def graphs(self) -> Graphs:
        return Graphs()

    @pytest.fixture(scope="class")
    def engine(
        self, graphs: Graphs, six_layers: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Any]:
        from vllm.compilation import backends

        from tests.preempted_engine import compiled_in_pieces, started

        with (
            mock.patch.object(backends, "wrap_with_cudagraph_if_needed", graphs.wrapped),
            compiled_in_pieces(tmp_path_factory.mktemp("compiled")),
            started(six_layers, enforce_eager=False) as engine,
        ):
            graphs.install(engine)
            yield engine
            assert_usable(engine)

    def test_rows_leave_and_join(self, engine: Any, graphs: Graphs) -> None:
        from tests.preempted_engine import Dice

        asked = mixed(30)
        wanted = engine.undisturbed(asked)
        for layer in range(LAYERS):
            before, replays = counts(engine), [piece.replays for piece in graphs.pieces]
            assert engine.scripted(asked, {n: [(layer, 2)] for n in (1, 3, 4)}) == wanted
            assert (counts(engine) - before)["preemptions"] == 3
            replayed = [piece.replays - was for piece, was in zip(graphs.pieces, replays, strict=True)]
            assert replayed == sorted(replayed, reverse=True)
            assert replayed[0] > replayed[-1] > 0
        for seed in range(4):
            assert engine.preempted(asked, Dice(seed, LAYERS)) == wanted

    def test_rows_lose_their_memory(self, engine: Any) -> None:
        storm(engine, 200)


@pytest.fixture(
    params=[pytest.param(kind, marks=[] if kind == "Mixtral" else pytest.mark.full) for kind in OTHERS]
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_other_models(kind: str, backend: str, demo_model: Path, tmp_path: Path) -> None:
    from tests.preempted_engine import Dice, compiled_in_pieces, started

    model = build_tiny_model(
        tmp_path / "model", tokenizer_from=demo_model, layers=LAYERS, kind=kind, **OTHERS[kind]
    )
    asked = mixed(40)
    with (
        compiled_in_pieces(tmp_path / "compiled", backend),
        started(model, enforce_eager=False) as engine,
    ):
        wanted = engine.undisturbed(asked)
        for layer in range(LAYERS):
            assert engine.scripted(asked, {n: [(layer, 1)] for n in (1, 3, 4)}) == wanted
        for seed in range(6):
            assert engine.preempted(asked, Dice(seed, LAYERS)) == wanted
        assert engine.preemptions.report()["rows_go_on"]
