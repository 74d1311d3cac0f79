"""Offline rows leave compiled passes between the pieces, and every answer is what it would have been."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

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
from tests.tiers import in_full
from tests.tiny_models import FEW_LAYERS as LAYERS
from tests.tiny_models import OTHERS, build_tiny_model
from tests.warned import OF_VLLM

pytestmark = [
    pytest.mark.engine,
    *OF_VLLM,
]


@pytest.fixture(scope="class")
def engine(
    few_layers: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """One start per class; pieces have graphs, which are replayed where a test installs them."""
    from tests.graphs_on_cpu import Graphs
    from tests.preempted_engine import compiled_in_pieces, started
    from tests.triton_on_cpu import v2_runner

    cache = tmp_path_factory.mktemp("compiled")
    flags = getattr(request.cls, "flags", {})
    graphs = Graphs()
    with (
        v2_runner() if getattr(request.cls, "v2", False) else nullcontext(),
        graphs.replacing_vllms(),
        compiled_in_pieces(cache),
        started(few_layers, enforce_eager=False, **flags) as engine,
    ):
        engine.graphs = graphs
        yield engine
        assert_usable(engine)


class BetweenPieces(Rows):
    """All that holds between decoder layers holds between compiled pieces."""

    def test_the_engine_says_so(self, engine: Any) -> None:
        from vllm.config import CompilationMode

        from conserve.engine.vllm.preemption.pieces import Pieces

        assert engine.worker.vllm_config.compilation_config.mode == CompilationMode.VLLM_COMPILE
        assert isinstance(engine.worker._rows, Pieces)
        assert engine.worker.use_v2_model_runner == getattr(self, "v2", False)
        assert engine.layers == LAYERS
        asked = offline_rows(20)
        engine.undisturbed(asked)
        assert engine.preemptions.report()["rows_go_on"]

    @pytest.mark.parametrize("preemptions", [100, *in_full(300)])
    def test_rows_lose_their_memory(self, engine: Any, preemptions: int) -> None:
        storm(engine, preemptions, kinds=20)

    # Between layers that are not compiled, `make test` tries these; what follows the cut is the same.

    @pytest.mark.full
    def test_an_iteration_of_offline_rows_alone_is_abandoned_at_any_layer(self, engine: Any) -> None:
        super().test_an_iteration_of_offline_rows_alone_is_abandoned_at_any_layer(engine)

    @pytest.mark.full
    def test_more_rows_leave_later_in_the_same_iteration(self, engine: Any) -> None:
        super().test_more_rows_leave_later_in_the_same_iteration(engine)

    @pytest.mark.full
    def test_logprobs_of_samples_and_prompts(self, engine: Any) -> None:
        super().test_logprobs_of_samples_and_prompts(engine)

    @pytest.mark.parametrize(
        ("victim", "whole"),
        [
            ("off3", False),
            ("on0", True),
            *in_full(("off3", True), ("off0", False), ("off0", True), ("on0", False)),
        ],
    )
    def test_requests_are_aborted_while_they_leave(self, engine: Any, victim: str, whole: bool) -> None:
        super().test_requests_are_aborted_while_they_leave(engine, victim, whole)

    @pytest.mark.parametrize("rows", [1, *in_full(2, -1)])
    def test_rows_leave_at_any_layer_while_others_go_on(self, engine: Any, rows: int) -> None:
        super().test_rows_leave_at_any_layer_while_others_go_on(engine, rows)

    def test_passes_that_no_row_leaves_run_in_one_go(
        self, engine: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from conserve.engine.vllm.preemption.segments import Segments
        from tests.preempted_engine import ALL

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
        assert not ran
        engine.forget()
        assert engine.scripted(rows, {1: [(2, ALL)], 2: [(2, 1)]}) == answers
        staying = [*range(2, LAYERS + 1)]  # what runs of the first iteration that not all rows leave
        assert ran[: len(staying)] == staying


class TestPieces(BetweenPieces):
    """With CUDA graphs of the pieces, too, played on a CPU: a pass leaves them where rows leave it."""

    def test_rows_leave_graphs_and_join(self, engine: Any) -> None:
        from tests.preempted_engine import Dice

        graphs, asked = engine.graphs, mixed(30)
        with graphs.installed(engine.worker):
            wanted = engine.undisturbed(asked)
            for layer in range(LAYERS):
                before, replays = counts(engine), [piece.replays for piece in graphs.pieces]
                assert engine.scripted(asked, {n: [(layer, 2)] for n in (1, 3, 4)}) == wanted
                assert (counts(engine) - before)["iterations_left"] == 3
                replayed = [piece.replays - was for piece, was in zip(graphs.pieces, replays, strict=True)]
                assert replayed == sorted(replayed, reverse=True)
                assert (replayed[0] > replayed[-1]) == (layer > 0)
                assert replayed[-1]
            for seed in range(2):
                assert engine.disturbed(asked, Dice(seed, LAYERS)) == wanted

    @pytest.mark.full
    def test_rows_that_leave_graphs_lose_their_memory(self, engine: Any) -> None:
        with engine.graphs.installed(engine.worker):
            storm(engine, 200)


@pytest.mark.full
class TestV2Pieces(BetweenPieces):
    """The same with vLLM's V2 model runner."""

    v2 = True


@pytest.mark.full
class TestLittleMemory:
    flags: ClassVar = {"kv_cache_memory_bytes": 18 * LAYERS * BLOCK_BYTES, "max_model_len": 512}

    def test_a_storm_of_rows_that_leave(self, engine: Any) -> None:
        assert storm(engine, 150, kinds=16, longest=100, losing=0.0)


@pytest.mark.full
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_other_models(kind: str, backend: str, few_words: Path, tmp_path: Path) -> None:
    from tests.preempted_engine import Dice, compiled_in_pieces, started

    model = build_tiny_model(
        tmp_path / "model", tokenizer_from=few_words, layers=LAYERS, kind=kind, **OTHERS[kind]
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
            assert engine.disturbed(asked, Dice(seed, LAYERS)) == wanted
        assert engine.preemptions.report()["rows_go_on"]


@pytest.mark.full
def test_a_model_from_vllms_cache(few_layers: Path, tmp_path: Path) -> None:
    """A model from the cache comes without the graphs that it was compiled from."""
    from vllm.compilation.counter import compilation_counter

    from tests.preempted_engine import Dice, compiled_in_pieces, started

    asked = mixed(50)
    loaded = compilation_counter.num_aot_artifacts_loaded
    answers = []
    for start in range(2):
        with compiled_in_pieces(tmp_path, "inductor"), started(few_layers, enforce_eager=False) as engine:
            answers += [engine.undisturbed(asked), engine.disturbed(asked, Dice(1, LAYERS))]
            assert engine.preemptions.report()["rows_go_on"]
            assert compilation_counter.num_aot_artifacts_loaded - loaded == start
    assert all(answer == answers[0] for answer in answers)


CODE = """
import torch

def __vllm_inlined_submods__1(q, out):
    done = __vllm_consts__[0].unified_kv_cache_update(q)
    attended = __vllm_consts__[0].unified_attention_with_output(q, out, kv_cache_dummy_dep=done)
    return ()

def __vllm_inlined_submods__3(q, out):
    done = __vllm_consts__[0].unified_kv_cache_update(q)
    attended = __vllm_consts__[0].unified_attention_with_output(q, out, kv_cache_dummy_dep=done)
    return ()

def execution_fn(s72, l_input_ids_, l_self_parameters_weight_, l_positions_, *, __vllm_submods__):
    submod_0 = __vllm_submods__[0](l_input_ids_, s72, l_self_parameters_weight_)
    del l_input_ids_
    q = submod_0[0]
    out = submod_0[1]
    del submod_0
    submod_1 = __vllm_inlined_submods__1(q, out)
    del q
    submod_2 = __vllm_submods__[2](out, s72, l_positions_)
    del out, l_positions_
    q_1 = submod_2[0]
    out_1 = submod_2[1]
    many = submod_2[2]
    del submod_2
    submod_3 = __vllm_inlined_submods__3(q_1, out_1)
    del q_1
    submod_4 = __vllm_submods__[4](out_1, many)
    last = submod_4[0]
    return (last,)
"""
MOST = 64  # tokens of a pass
WEIGHT = 8  # entries


class Made:
    """A compiled model of two layers, whose pieces a test can replace."""

    def __init__(self, *, code: str = CODE, **pieces: Any) -> None:
        from vllm.compilation.codegen import compile_execution_fn

        from conserve.engine.vllm.preemption.segments import Stitched

        self.pieces = {"first": self.first, "second": self.second, "last": lambda out, many: (out + many,)}
        self.pieces.update(pieces)
        first, second, last = (self.pieces[name] for name in ("first", "second", "last"))
        listed = [first, None, second, None, last]
        names = [f"submod_{n}" for n in range(5)]
        consts = [self]
        whole = compile_execution_fn(code, dict(zip(names, listed, strict=True)), names, consts)
        self.stitched = Stitched(whole, code, listed, consts)

    def first(self, ids: Any, tokens: int, weight: Any) -> Any:
        spread = ids[:, None] * weight
        return spread, spread * 2

    def second(self, out: Any, tokens: int, positions: Any) -> Any:
        spread = out + positions[:, None]
        return spread, spread * 3, 5 * tokens

    def unified_kv_cache_update(self, q: Any) -> Any:
        return q

    def unified_attention_with_output(self, q: Any, out: Any, *, kv_cache_dummy_dep: Any) -> None:
        out += q

    def call(self, tokens: int, weight: int = WEIGHT) -> Any:
        import torch

        ids = torch.arange(tokens, dtype=torch.float32)
        return self.stitched(tokens, ids, torch.ones(weight), ids + 7)

    def layouts(self) -> Any:
        from conserve.engine.vllm.preemption.layouts import layouts_of

        return layouts_of(self.stitched, self.stitched.segments(), self.call, MOST)

    def why_not(self) -> str:
        from conserve.engine.vllm.preemption.segments import NotDivisible

        with pytest.raises(NotDivisible) as refused:
            self.layouts()
        return str(refused.value)


class TestTheParts:
    def test_segments_compute_what_the_whole_function_does(self) -> None:
        import torch

        from conserve.engine.vllm.preemption.segments import RESULT

        made = Made()
        segments = made.stitched.segments()
        assert [sorted(live) for live in segments.live] == [
            ["l_input_ids_", "l_positions_", "l_self_parameters_weight_", "s72"],
            ["l_positions_", "out", "s72"],
            ["many", "out_1"],
        ]
        ids = torch.arange(6, dtype=torch.float32)
        variables = dict(zip(segments.names, (6, ids, torch.ones(WEIGHT), ids + 7), strict=True))
        for index in range(3):
            segments.run(index, variables)
        ((wanted,), (got,)) = made.call(6), variables[RESULT]
        assert torch.equal(got, wanted)

    @pytest.mark.parametrize(
        ("every", "known", "stops"), [(1, 9, None), (1, 0, 0), (2, 4, None), (1, 1, 1), (2, 1, None)]
    )
    def test_a_watched_pass_stops_where_an_order_comes(
        self, every: int, known: int, stops: int | None
    ) -> None:
        import torch

        from conserve.engine.vllm.preemption.segments import RESULT

        class Orders:
            looks = 0

            def __getitem__(self, slot: int) -> int:
                assert slot == 5
                self.looks += 1
                return self.looks

        made = Made()
        segments, ids = made.stitched.segments(), torch.arange(6, dtype=torch.float32)
        stopped: list[int] = []

        def rest(index: int, variables: dict[str, Any]) -> Any:
            stopped.append(index)
            for rest in range(index, 3):
                segments.run(rest, variables)
            return variables[RESULT]

        watched = segments.watched(every)
        (got,) = watched(6, ids, torch.ones(WEIGHT), ids + 7, Orders(), 5, known, rest)
        assert torch.equal(got, made.call(6)[0])
        assert stopped == ([] if stops is None else [stops])

    def test_what_has_an_entry_a_token_is_told_by_two_passes(self) -> None:
        first, second, third, results = Made().layouts()
        assert dict(first.tensors) == {"l_input_ids_": (0, None), "l_positions_": (0, None)}
        assert dict(first.numbers) == {"s72": 1}
        assert dict(second.tensors) == {"out": (0, None), "l_positions_": (0, None)}
        assert dict(third.tensors) == {"out_1": (0, None)}
        assert dict(third.numbers) == {"many": 5}
        assert dict(results.tensors) == {"0": (0, None)}

    def test_tokens_may_be_any_dimension_and_lie_apart(self) -> None:
        for turn, axis in (
            (lambda out: (out * 2)[None], (1, None)),
            (lambda out: (out * 2)[:, :3], (0, (WEIGHT, 1))),
            (lambda out: (out * 2).T, (1, (1, WEIGHT))),
        ):
            made = Made(
                second=lambda out, n, _, turn=turn: (out, out * 2, turn(out)),
                last=lambda out, many: (out[None], many),
                code=CODE.replace("return (last,)", "return (last, submod_4[1])"),
            )
            _, _, before_last, results = made.layouts()
            assert before_last.tensors["many"] == axis
            assert dict(results.tensors) == {"0": (1, None), "1": axis}
            _, wanted = made.call(9)
            _, longer = made.call(30)
            tokens_first = before_last.tensors["many"].forwards(longer)
            again = before_last.tensors["many"].back(tokens_first[:9])
            assert again.equal(wanted)
            assert again.stride() == wanted.stride()

    def test_a_weight_as_long_as_a_pass_is_none(self) -> None:
        from conserve.engine.vllm.preemption.layouts import TRIED_TOKENS

        for tokens in TRIED_TOKENS:
            made = Made(
                first=lambda ids, n, weight: (ids[:, None] * weight[:2], ids[:, None] * weight[:2]),
                second=lambda out, n, positions: (out, out * 2, n),
            )
            made.call = lambda n, call=made.call, tokens=tokens: call(n, tokens)  # type: ignore[method-assign]
            assert sorted(made.layouts()[0].tensors) == ["l_input_ids_", "l_positions_"]

    def test_other_models_are_refused(self) -> None:
        import torch

        def second(change: Any) -> Any:
            return lambda out, tokens, positions: change(out, tokens)

        indexer = CODE.replace("unified_kv_cache_update", "sparse_attn_indexer", 1)
        assert "split at sparse_attn_indexer" in Made(code=indexer).why_not()
        shared = Made(second=second(lambda out, n: (out, out * 2, out[:, :1])), last=lambda out, _: (out,))
        assert "share memory" not in "".join(map(str, [shared.layouts()]))  # q is gone by the next segment
        shared = Made(second=second(lambda out, n: (out * 2, out, out[:, :1])), last=lambda out, _: (out,))
        assert "share memory" in shared.why_not()
        constant = Made(
            second=second(lambda out, n: (out, out * 2, torch.ones(3))), last=lambda out, _: (out,)
        )
        assert "many, which is computed" in constant.why_not()
        rounded = Made(second=second(lambda out, n: (out, out * 2, -(-n // 8) * 8)))
        assert "many, which is 24 for 17 tokens" in rounded.why_not()
        square = Made(second=second(lambda out, n: (out, out * 2, out @ out.T)), last=lambda out, _: (out,))
        assert "many, which is Shape(sizes=(17, 17)" in square.why_not()
        spread = Made(
            second=second(lambda out, n: (out, out * 2, (out[:, :1] * 2).expand(-1, 3))),
            last=lambda out, _: (out,),
        )
        assert "many, which is Shape(sizes=(17, 3), strides=(1, 0)" in spread.why_not()
        nothing = Made()
        nothing.call = lambda _, call=nothing.call: call(20)  # type: ignore[method-assign]
        assert "no argument has an entry a token" in nothing.why_not()
        summed = Made(last=lambda out, many: (out.sum(0),))
        assert "pass on 0, which is computed" in summed.why_not()

    def test_a_buffer_of_all_tokens_is_refused(self) -> None:
        """A piece may read it at the places of the tokens, which change where rows leave."""
        code = CODE.replace("l_self_parameters_weight_", "l_self_scratch_")
        made = Made(
            code=code, first=lambda ids, n, scratch: (ids[:, None] * scratch[:2], ids[:, None] * scratch[:2])
        )
        call = made.call
        assert made.layouts()
        made.call = lambda tokens: call(tokens, MOST)  # type: ignore[method-assign]
        assert "l_self_scratch_ token by token" in made.why_not()

    def test_functions_that_vllm_makes_meanwhile_are_noted(self) -> None:
        from vllm.compilation import backends, caching

        from conserve.engine.vllm.preemption.segments import Stitched, recorded

        before = backends.compile_execution_fn
        found: list[Stitched] = []
        with recorded(found):
            for place in (backends, caching):
                place.compile_execution_fn(CODE, {}, [], None)
        assert len(found) == 2
        assert backends.compile_execution_fn is caching.compile_execution_fn is before
