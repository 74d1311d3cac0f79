"""Offline rows leave iterations at any layer, and every answer is what it would have been."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest

from conserve.engine.runtime.safepoint import ALL_ROWS
from tests.asked_orders import Asking
from tests.few_slots import keep_no_slot
from tests.tiers import in_full
from tests.tiny_models import FEW_LAYERS as LAYERS
from tests.warned import OF_VLLM

pytestmark = [
    pytest.mark.engine,
    *OF_VLLM,
]

BLOCK_BYTES = 2 * 32 * 64 * 4  # of a layer: keys and values of 32 tokens, 64 float32 each
CLOSE = 1e-4  # of logprobs: float32, added up in another order


@pytest.fixture(scope="class")
def engine(few_layers: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """One start per class, never two engines at once: they would share vLLM's globals."""
    from tests.preempted_engine import started
    from tests.triton_on_cpu import v2_runner

    measure_format(few_layers)
    v2 = getattr(request.cls, "v2", False)
    with pytest.MonkeyPatch.context() as patch, v2_runner() if v2 else nullcontext():
        if getattr(request.cls, "hidden", False):
            patch.setattr("conserve.engine.vllm.preemption.worker.decoder_layers", lambda model, count: None)
        with started(few_layers, **getattr(request.cls, "flags", {})) as engine:
            assert engine.worker.use_v2_model_runner is v2
            yield engine
            assert_usable(engine)


def measure_format(model: Path) -> None:
    """Measure float32 products of the model's shape, as the start of a server in this process does.

    vLLM keeps these products for engines of the same process.
    """
    from conserve.engine.runtime.number_format import Shapes, measure
    from conserve.engine.vllm.launching.number_format import read_config, vllms_products

    config = read_config(str(model))
    assert config is not None
    assert measure(vllms_products, Shapes.of(config), ["float32"])


def assert_usable(engine: Any) -> None:
    """No test has broken it for the next."""
    asked = mixed(90)
    assert engine.together(asked) == engine.undisturbed(asked)
    engine.assert_nothing_is_left()


def offline_rows(seed: int, count: int = 4) -> list[Any]:
    from tests.preempted_engine import Ask, greedy, prompt

    return [
        Ask(f"off{n}", prompt(30 + n * 67 % 190, seed * 100 + n), greedy(5 + n % 4)) for n in range(count)
    ]


def online_rows(seed: int, count: int = 2) -> list[Any]:
    from tests.preempted_engine import Ask, greedy, prompt

    rows = range(count)
    return [Ask(f"on{n}", prompt(20 + n * 31, seed * 100 + 50 + n), greedy(12), offline=False) for n in rows]


def mixed(seed: int) -> list[Any]:
    return [*offline_rows(seed), *online_rows(seed)]


def counts(engine: Any) -> Counter[str]:
    """Counters of the engine, to take differences of."""
    report = engine.preemptions.report()
    return Counter({name: value for name, value in report.items() if isinstance(value, int | float)})


def assert_close(got: Sequence[dict[int, float]], wanted: Sequence[dict[int, float]]) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert one == pytest.approx(other, abs=CLOSE)


def run_rows(engine: Any, rows: Sequence[Any]) -> None:
    """Let rows arrive, and step until these have all slots that are not kept for live requests: half at least."""
    engine.add(*rows)
    while len(engine.scheduler.running) < 8:
        assert engine.busy
        engine.step()


def shared_prefixes(engine: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rows that leave, one that runs and one that comes while they have not been computed: answers, and right ones.

    All begin alike; the one that comes would find all of the first one's blocks, were they registered.
    """
    from tests.preempted_engine import ALL, Ask, greedy, prompt

    prefix = prompt(70, 1)
    early = Ask("on0", prompt(10, 2, prefix), greedy(12), offline=False)
    rows = [Ask(f"off{n}", prompt(40, n, prompt(20, 3, prefix)), greedy(4)) for n in range(2)]
    late = Ask("on1", prompt(9, 4, rows[0].prompt), greedy(3), offline=False)
    wanted = engine.undisturbed([early, *rows, late])
    engine.orders.follow(engine.orders.script({n: [(2, ALL)] for n in (1, 2, 3, 4)}))
    engine.add(early)
    engine.step()
    engine.add(*rows)
    engine.step()
    engine.add(late)
    answers = engine.drain()
    engine.orders.follow(None)
    engine.forget()
    return answers, wanted


class Rows:
    """Properties wherever rows can leave, with and without cached prefixes."""

    def test_an_iteration_of_offline_rows_alone_is_abandoned_at_any_layer(self, engine: Any) -> None:
        from tests.preempted_engine import ALL

        asked = offline_rows(1)
        wanted = engine.undisturbed(asked)
        for layer in range(LAYERS):
            before = counts(engine)
            assert engine.scripted(asked, {n: [(layer, ALL)] for n in (1, 2, 4)}) == wanted
            new = counts(engine) - before
            assert new["iterations_left"] == new["abandoned"] == 3
            assert new["layers_run"] == 3 * layer

    @pytest.mark.parametrize("rows", [1, 2, -1])
    def test_rows_leave_at_any_layer_while_others_go_on(self, engine: Any, rows: int) -> None:
        asked = mixed(2)
        wanted = engine.undisturbed(asked)
        for layer in range(LAYERS):
            before = counts(engine)
            orders = {1: [(layer, rows)], 3: [(layer, rows)], 4: [(layer, 1)]}
            assert engine.scripted(asked, orders) == wanted
            new = counts(engine) - before
            assert new["iterations_left"] == 3
            assert not new["abandoned"]
            assert new["layers_run"] == 3 * layer
            assert new["rows"] == 2 * rows + 1 or (rows == -1 and new["rows"] > 5)

    def test_more_rows_leave_later_in_the_same_iteration(self, engine: Any) -> None:
        from tests.preempted_engine import ALL

        asked = mixed(3)
        wanted = engine.undisturbed(asked)
        for first in range(LAYERS - 1):
            for second in range(first + 1, LAYERS):
                before = counts(engine)
                orders = {
                    1: [(first, 1), (second, 2)],
                    2: [(first, 1), (second, ALL)],
                    4: [(first, 1), (second, ALL_ROWS)],
                    5: [(first, 1), (min(first + 1, second), 2), (second, 3)],
                }
                assert engine.scripted(asked, orders) == wanted
                new = counts(engine) - before
                assert new["iterations_left"] == 4
                assert new["abandoned"] == 1
                assert new["layers_run"] == 4 * first, (
                    "the first to leave wasted the least, and no row counts more"
                )

    def test_online_rows_go_along_where_everybody_leaves(self, engine: Any) -> None:

        asked = mixed(4)
        wanted = engine.undisturbed(asked)
        for layer in range(LAYERS):
            assert engine.scripted(asked, {n: [(layer, ALL_ROWS)] for n in (1, 2, 5)}) == wanted

    def test_no_layer_computes_a_token_twice_for_a_row_that_left(self, engine: Any) -> None:
        from tests.preempted_engine import ALL

        asked = mixed(11)
        wanted = engine.undisturbed(asked)
        scripts = (
            {1: [(1, 1), (2, ALL)], 2: [(1, 1), (3, 2)], 3: [(2, ALL)], 5: [(1, ALL)]},
            {1: [(2, ALL)], 2: [(1, ALL)], 3: [(3, ALL)], 6: [(2, ALL)], 7: [(1, 1)]},
            {1: [(1, 1), (2, ALL_ROWS)], 2: [(3, 2)], 4: [(2, ALL_ROWS)]},
        )
        for script in scripts:
            before = counts(engine)
            with engine.counting_tokens() as computed:
                assert engine.scripted(asked, script) == wanted
            tokens = sum(len(ask.prompt) + ask.params.max_tokens - 1 for ask in asked)
            assert computed == [tokens] * LAYERS
            new = counts(engine) - before
            assert new["iterations_left"] == len(script)
            assert not new["tokens_redone"]
            assert not new["tokens_wasted"]

    @pytest.mark.parametrize("again", [2, 3])
    def test_what_a_smaller_chunk_leaves_over_keeps_what_it_had_computed(
        self, engine: Any, again: int
    ) -> None:
        """A row leaves with its prompt, and once more with the part of it that a live prompt leaves room for."""
        from tests.preempted_engine import ALL, Ask, greedy, prompt

        row = Ask("off", prompt(240, 500), greedy(3))
        live = Ask("on0", prompt(20, 501), greedy(12), offline=False)
        late = Ask("on1", prompt(180, 502), greedy(3), offline=False)
        wanted = engine.undisturbed([row, live, late])
        before, chunks = counts(engine), []
        engine.chunks["off"] = chunks
        engine.orders.follow(engine.orders.script({1: [(2, ALL)], 2: [(again, ALL)]}))
        with engine.counting_tokens() as computed:
            engine.add(live)
            engine.step()
            engine.add(row)
            engine.step()
            engine.add(late)
            assert engine.drain() == wanted
        engine.orders.follow(None)
        engine.chunks.clear()
        assert chunks[0] == (240, True)
        assert chunks[1].left
        assert 20 < chunks[1].tokens < 100
        assert (
            computed
            == [sum(len(ask.prompt) + ask.params.max_tokens - 1 for ask in (row, live, late))] * LAYERS
        )
        new = counts(engine) - before
        assert not new["tokens_redone"]
        assert not new["tokens_wasted"]
        engine.assert_nothing_is_left()
        engine.forget()

    @pytest.mark.parametrize("leaves", [{}, {1: [(2, -1)]}, {1: [(1, -1)], 2: [(3, -1)]}])
    def test_rows_that_give_their_slots_up_go_on_where_they_were(
        self, engine: Any, leaves: dict[int, Any]
    ) -> None:
        """More live requests come than find a free slot, while some rows decode and one is in its prompt."""
        from tests.preempted_engine import Ask, greedy, prompt

        lengths = [110 + 7 * n if n < 7 else 700 for n in range(10)]
        rows = [Ask(f"off{n}", prompt(tokens, 700 + n), greedy(24)) for n, tokens in enumerate(lengths)]
        live = [Ask(f"on{n}", prompt(20, 750 + n), greedy(12), offline=False) for n in range(14)]
        wanted = engine.undisturbed([*rows, *live])
        scheduler = engine.scheduler
        before, parked, again = counts(engine), scheduler.parking.count, scheduler.offline_tokens.again
        with engine.counting_tokens() as computed:
            run_rows(engine, rows)
            engine.orders.follow(engine.orders.script(leaves))
            for _ in leaves:
                engine.step()
            engine.add(*live)
            assert engine.drain() == wanted
        engine.orders.follow(None)
        assert (
            computed == [sum(len(ask.prompt) + ask.params.max_tokens - 1 for ask in (*rows, *live))] * LAYERS
        )
        assert scheduler.parking.count - parked >= 4
        assert scheduler.offline_tokens.again == again
        new = counts(engine) - before
        assert bool(new["iterations_left"]) == bool(leaves)
        assert not new["tokens_redone"]
        assert not new["tokens_wasted"]
        engine.assert_nothing_is_left()
        engine.forget()

    def test_a_row_without_a_slot_loses_its_memory_where_live_requests_lack_it(self, engine: Any) -> None:
        from tests.preempted_engine import Ask, greedy, prompt

        rows = [Ask(f"off{n}", prompt(150, 800 + n), greedy(50)) for n in range(10)]
        live = [Ask(f"on{n:02}", prompt(480, 850 + n), greedy(60), offline=False) for n in range(14)]
        wanted = engine.undisturbed([*rows, *live])
        scheduler = engine.scheduler
        run_rows(engine, rows)
        engine.orders.follow(engine.orders.script({1: [(2, -1)]}))
        engine.step()
        engine.add(*live)
        lost = 0
        while engine.busy:
            held = {*scheduler.parking.names}
            engine.step()
            lost += len(held & {request.request_id for request in scheduler.waiting})
            engine.overwrite_free()
        answers, engine.answers = engine.answers, {}
        engine.orders.follow(None)
        assert answers == wanted
        assert lost
        engine.assert_nothing_is_left()
        engine.forget()

    def test_rows_share_prefixes_with_those_that_left(self, engine: Any) -> None:
        answers, wanted = shared_prefixes(engine)
        assert answers == wanted

    @pytest.mark.parametrize("seed", [0, *in_full(1, 2)])
    def test_prompts_in_chunks(self, engine: Any, seed: int) -> None:
        from tests.preempted_engine import Ask, Dice, greedy, prompt

        prefix = prompt(130, seed)
        rows = [
            Ask(f"off{n}", prompt(100 + 90 * n, seed * 9 + n, prefix[: 65 * n]), greedy(4)) for n in range(4)
        ]
        asked = [*rows, Ask("on", prompt(20, seed, prefix), greedy(30), offline=False)]
        before = counts(engine)
        assert engine.undisturbed(asked) == engine.disturbed(asked, Dice(seed, LAYERS))
        assert (counts(engine) - before)["iterations_left"] > 5

    def test_logprobs_of_samples_and_prompts(self, engine: Any) -> None:
        from tests.preempted_engine import ALL, Ask, Dice, greedy, prompt

        params: tuple[dict[str, int], ...] = (
            {"prompt_logprobs": 2},
            {"logprobs": 2},
            {"logprobs": 1, "prompt_logprobs": 1},
            {},
        )
        rows = [
            Ask(f"off{n}", prompt(60 + 100 * n, 60 + n), greedy(4, **kinds)) for n, kinds in enumerate(params)
        ]
        asked = [*rows, Ask("on", prompt(40, 70), greedy(25, logprobs=1, prompt_logprobs=1), offline=False)]
        wanted = engine.undisturbed(asked)
        assert [len(wanted["off2"].logprobs), len(wanted["off2"].prompt_logprobs)] == [4, 259]
        each = engine.orders.script({n: [(n % LAYERS, ALL)] for n in range(1, 40, 2)})  # last chunks too
        for decide in (each, *(Dice(seed, LAYERS) for seed in range(2))):
            answers = engine.disturbed(asked, decide)
            for ask in asked:
                got, right = answers[ask.name], wanted[ask.name]
                assert got.tokens == right.tokens
                assert_close(got.logprobs, right.logprobs)
                assert_close(got.prompt_logprobs, right.prompt_logprobs)

    @pytest.mark.parametrize("whole", [False, True])
    @pytest.mark.parametrize("victim", ["off3", "off0", "on0"])
    def test_requests_are_aborted_while_they_leave(self, engine: Any, victim: str, whole: bool) -> None:
        """The abort reaches the engine core before the iteration's results do."""

        asked = mixed(5)
        wanted = engine.undisturbed(asked)
        for at in (1, 2, 4):

            def decide(stamp: Any, layer: int, at: int = at) -> int:
                if engine.orders.iterations == at and layer == 1:
                    engine.abort(victim)
                due = engine.orders.iterations in (at - 1, at) and layer >= 2
                return (ALL_ROWS if whole else len(stamp.rows)) if due else 0

            answers = engine.disturbed(asked, decide)
            assert victim not in answers
            assert answers == {name: answer for name, answer in wanted.items() if name != victim}


@pytest.mark.full
class TestWithoutPrefixCaching(Rows):
    flags: ClassVar = {"enable_prefix_caching": False}


class TestWithPrefixCaching(Rows):
    """Rows whose prefixes are cached, and other cases for which this engine is enough."""

    def test_blocks_registered_before_they_are_computed_would_be_read(
        self, engine: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The negative control: with vLLM's own registration the answers above are wrong, and are seen to be."""
        from conserve.engine.vllm.scheduling import application

        monkeypatch.setattr(application, "registered_late", lambda manager, **_: nullcontext())
        answers, wanted = shared_prefixes(engine)
        wrong = {name for name, answer in answers.items() if answer != wanted[name]}
        assert "on1" in wrong

    @pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning")
    def test_structured_output(self, engine: Any) -> None:
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams

        from tests.preempted_engine import Ask, Dice, prompt

        schema = {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "green"]}, "good": {"type": "boolean"}},
            "required": ["colour", "good"],
            "additionalProperties": False,
        }
        forms: list[dict[str, Any]] = [
            {"regex": "[a-f]{4}-[0-9]{5}"},
            {"json": schema},
            {"choice": ["yes", "no"]},
        ] * 2
        asked = [
            Ask(
                f"row{n}",
                prompt(40 + 30 * n, 80 + n),
                SamplingParams(
                    temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(**form)
                ),
                offline=n < 5,
            )
            for n, form in enumerate(forms)
        ]
        asked += mixed(6)
        wanted = engine.undisturbed(asked)
        assert re.fullmatch(forms[0]["regex"], wanted["row0"].text)
        assert json.loads(wanted["row1"].text)["colour"] in ("red", "green")
        for seed in range(2):
            before = counts(engine)
            assert engine.disturbed(asked, Dice(seed, LAYERS)) == wanted
            assert (counts(engine) - before)["iterations_left"] > 3

    def test_a_flag_for_an_iteration_that_has_ended_says_nothing(self, engine: Any) -> None:
        asked = mixed(7)
        wanted = engine.undisturbed(asked)
        preemptions = engine.preemptions
        with real_flag(engine):
            before = counts(engine)
            engine.add(*asked)
            while engine.busy:
                engine.step()
                if preemptions._iterations:
                    preemptions._flag.raise_for(preemptions._iterations)
            assert engine.drain() == wanted
            assert counts(engine)["iterations_left"] == before["iterations_left"]
            engine.add(*asked)
            preemptions._flag.raise_for(preemptions._iterations + 1, 2)  # and one for the next is obeyed
            assert engine.drain() == wanted
            assert (counts(engine) - before)["iterations_left"] == 1

    def test_arrivals_in_another_thread_preempt_the_iteration_under_way(self, engine: Any) -> None:
        """The whole way: vLLM's I/O thread, the monitor, the shared word, the worker, the rewinding."""
        from tests.preempted_engine import Ask, greedy, prompt

        rows = [Ask(f"off{n}", prompt(240, 200 + n), greedy(6)) for n in range(20)]
        online = [Ask(f"on{n}", prompt(24, 300 + n), greedy(5), offline=False) for n in range(20)]
        wanted = engine.undisturbed([*rows, *online])
        before = counts(engine)
        engine.scheduler.conserve({"preemption": "all-offline", "slo": {"ttft_ms": 1.0}})
        with arrivals(engine, online, seed=1) as coming:
            engine.add(*rows)
            while engine.busy or coming.left:
                for prepared in coming.taken():
                    engine.add_prepared(prepared)
                engine.step()
        answers = engine.drain()
        engine.scheduler.conserve({"preemption": "prompt", "slo": {}})
        assert answers == wanted
        new = counts(engine) - before
        assert coming.midway > 10, "of the arrivals, those in the middle of an iteration"
        assert new["iterations_left"] >= coming.midway // 2, new
        engine.assert_nothing_is_left()
        engine.forget()

    def test_a_row_that_always_leaves_takes_smaller_chunks_and_then_shelter(self, engine: Any) -> None:
        from conserve.engine.runtime.leavers import SHELTER_AFTER, SHRINK_AFTER
        from tests.preempted_engine import Ask, greedy, prompt

        row = Ask("off", prompt(200, 400), greedy(3))
        online = Ask("on", prompt(20, 401), greedy(40), offline=False)
        wanted = engine.undisturbed([row, online])
        chunks: list[Any] = []
        engine.chunks["off"] = chunks
        most = 3 * (SHELTER_AFTER + 1)  # of a few tokens each, a prompt takes hundreds
        answers = engine.disturbed(
            [row, online], lambda stamp, layer: len(stamp.rows) * (layer >= 3 and len(chunks) < most)
        )
        assert answers == wanted
        engine.chunks.clear()
        smaller = [max(1, 200 >> max(0, n + 1 - SHRINK_AFTER)) for n in range(SHELTER_AFTER + 1)]
        assert [chunk.tokens for chunk in chunks][: SHELTER_AFTER + 1] == smaller
        assert [chunk.left for chunk in chunks][: SHELTER_AFTER + 1] == [True] * SHELTER_AFTER + [False]
        following = chunks[SHELTER_AFTER + 1]
        assert following.left, "a row that has computed something is one like the others"
        assert following.tokens == 200 - smaller[-1], "and its chunks are not cut any more"

    @pytest.mark.parametrize("change", [{"preemption": "off"}, {"policy": "priority"}])
    def test_rows_go_on_when_preemption_is_switched_off_under_way(
        self, engine: Any, change: dict[str, str]
    ) -> None:
        from tests.preempted_engine import ALL, Ask, greedy, prompt

        rows = [Ask("off0", prompt(200, 410), greedy(3)), *offline_rows(12, 2)[1:]]
        asked = [*rows, *online_rows(12)]
        wanted = engine.undisturbed(asked)
        chunks: list[Any] = []
        engine.chunks["off0"] = chunks
        engine.orders.follow(engine.orders.script({n: [(3, ALL)] for n in range(1, 6)}))
        engine.add(*asked)
        while not (engine.orders.iterations >= 5 and chunks and chunks[-1].left):
            engine.step()
        left = len(chunks)
        engine.scheduler.conserve(change)
        answers = engine.drain()
        engine.scheduler.conserve({"preemption": "prompt", "policy": "conserve"})
        engine.orders.follow(None)
        engine.chunks.clear()
        assert answers == wanted
        assert left == 5
        assert not any(chunk.left for chunk in chunks[left:])
        assert sum(chunk.tokens for chunk in chunks[left : left + 2]) >= 200, (
            "its chunks are not cut any more"
        )
        engine.assert_nothing_is_left()
        engine.forget()

    @pytest.mark.parametrize(
        "preemptions",
        [150, *in_full(300, 2000), pytest.param(10_000, marks=pytest.mark.soak)],
    )
    def test_a_storm_of_rows_that_leave(self, engine: Any, preemptions: int) -> None:
        storm(engine, preemptions)


class TestSeeds:
    """Rows that bring a seed of their own; on a CPU, vLLM's own worker cannot cut their prompts into chunks."""

    def test_random_numbers_are_those_of_an_undisturbed_row(self, engine: Any) -> None:
        from tests.preempted_engine import Dice

        asked = self.rows(60)
        wanted = engine.undisturbed(asked)
        assert len({answer.tokens for answer in wanted.values()}) == len(asked)
        for seed in range(3):
            before = counts(engine)
            assert engine.disturbed(asked, Dice(seed, LAYERS)) == wanted
            assert (counts(engine) - before)["iterations_left"] > 3

    def test_so_are_those_of_a_row_under_shelter(self, engine: Any) -> None:
        """A sheltered row's iteration has no safepoints if the row is alone, and no row leaves it."""
        asked = self.rows(6)[:1]  # a sheltered iteration computes a token or two
        wanted = engine.undisturbed(asked)
        for layer in (0, 3):
            assert engine.disturbed(asked, lambda _, now, layer=layer: int(now >= layer)) == wanted

    def test_prompts_in_chunks(self, engine: Any) -> None:
        from tests.preempted_engine import Dice

        asked = self.rows(300)
        wanted = engine.undisturbed(asked)
        assert engine.together(asked) == wanted
        for seed in range(2):
            assert engine.disturbed(asked, Dice(seed, LAYERS)) == wanted

    def rows(self, tokens: int) -> list[Any]:
        from vllm.sampling_params import SamplingParams

        from tests.preempted_engine import Ask, prompt

        return [
            Ask(
                f"row{n}",
                prompt(tokens, 500 + n),
                SamplingParams(max_tokens=8, temperature=1.0, seed=n, ignore_eos=True),
                offline=n < 3,
            )
            for n in range(4)
        ]


@pytest.mark.full
class TestLittleMemory:
    """Rows lose their memory to others too, as vLLM evicts them."""

    flags: ClassVar = {"kv_cache_memory_bytes": 18 * LAYERS * BLOCK_BYTES, "max_model_len": 512}

    def test_a_storm_of_rows_that_leave(self, engine: Any) -> None:
        lost = storm(engine, 400, kinds=16, longest=100, losing=0.0)
        assert lost


@pytest.mark.full
class TestFewSlots:
    """Rows have all slots, and give them up in the middle of prompts and layers; memory is short now and then."""

    flags: ClassVar = {
        "max_num_seqs": 3,
        "kv_cache_memory_bytes": 40 * LAYERS * BLOCK_BYTES,
        "max_model_len": 512,
    }

    def test_a_storm_of_rows_that_leave(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        keep_no_slot(engine.scheduler, monkeypatch)
        parked = engine.scheduler.parking.count
        lost = storm(engine, 1500, kinds=16, longest=60, losing=0.02)
        assert engine.scheduler.parking.count - parked > 20
        assert lost


class Attention:
    """No row leaves a model with safepoints in its attention calls alone; all leave, if all are offline."""

    def test_iterations_of_offline_rows_are_abandoned(self, engine: Any) -> None:
        assert engine.worker._rows is None
        asked = offline_rows(8)
        wanted = engine.undisturbed(asked)
        for call in range(LAYERS):
            before = counts(engine)
            assert engine.scripted(asked, {n: [(call, 1)] for n in (1, 2, 4)}) == wanted
            new = counts(engine) - before
            assert new["iterations_left"] == new["abandoned"] == 3
            assert new["layers_run"] == 3 * call

    def test_no_online_request_is_computed_twice(self, engine: Any) -> None:
        from tests.preempted_engine import Ask, greedy, prompt

        longer = [Ask(f"long{n}", prompt(40, 800 + n), greedy(40)) for n in range(2)]
        asked = [*mixed(8), *longer]  # online requests come and go beside them
        wanted = engine.undisturbed(asked)
        before = counts(engine)
        assert engine.disturbed(asked, lambda stamp, layer: len(stamp.rows)) == wanted
        new = counts(engine) - before
        assert new["abandoned"] > 3
        assert not new["live_tokens_recomputed"]

    def test_rows_are_sheltered_and_all_with_them(self, engine: Any) -> None:
        asked = mixed(9)
        assert engine.disturbed(asked, lambda _, layer: int(layer >= 3)) == engine.undisturbed(asked)

    def test_at_random(self, engine: Any) -> None:
        from tests.preempted_engine import Dice

        asked = mixed(10)
        wanted = engine.undisturbed(asked)
        for seed in range(2):
            assert engine.disturbed(asked, Dice(seed, LAYERS)) == wanted


class TestHiddenLayers(Attention):
    """A model whose layers are not found."""

    hidden = True


@pytest.mark.full
class TestCompiled(Attention):
    """The model is compiled as one graph, which calls attention within."""

    flags: ClassVar = {"enforce_eager": False, "compilation_config": {"mode": 2}}


# With vLLM's V2 model runner; `test_runners.py` notices the same faults in minutes.


@pytest.mark.full
class TestV2WithoutPrefixCaching(TestWithoutPrefixCaching):
    v2 = True


@pytest.mark.full
class TestV2WithPrefixCaching(TestWithPrefixCaching):
    v2 = True


@pytest.mark.full
class TestV2Seeds(TestSeeds):
    v2 = True


@pytest.mark.full
class TestV2LittleMemory(TestLittleMemory):
    v2 = True


@pytest.mark.full
class TestV2FewSlots(TestFewSlots):
    v2 = True


@pytest.mark.full
class TestV2HiddenLayers(TestHiddenLayers):
    v2 = True


@pytest.mark.full
class TestV2Compiled(TestCompiled):
    v2 = True


class TestTheSchedulerAlone:
    """vLLM's scheduler with outcomes made up, thousands of iterations a second."""

    @pytest.mark.parametrize("blocks", [40, 4096])
    @pytest.mark.parametrize("seed", [0, *in_full(1)])
    def test_counters_are_exact_after_any_outcome(
        self, seed: int, blocks: int, tmp_path: Path, clock: Any
    ) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        from tests.preempted_scheduler import PreemptedScheduler

        engine = PreemptedScheduler(tmp_path, clock, blocks=blocks, seed=seed)
        assert isinstance(engine.scheduler, Scheduler)
        dice = random.Random(seed)
        for n in range(1000):
            if n < 850 and len(engine.scheduler.requests) < 12 and dice.random() < 0.3:
                length, most = int(10 ** dice.uniform(0, 2.6)), dice.randint(1, 20)
                engine.add(length, most, offline=dice.random() < 0.7)
            if engine.scheduler.requests and dice.random() < 0.01:
                engine.abort_one_while_it_runs = True
            engine.step()
        while engine.scheduler.requests:
            engine.step()
        engine.step()
        scheduler = engine.scheduler
        assert scheduler.arrival_monitor.counts.iterations_left > 300
        assert engine.aborted
        assert not scheduler.running
        assert not scheduler.waiting
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert not [
            name for name, part in vars(scheduler.arrival_monitor).items() if isinstance(part, dict) and part
        ]
        for request in engine.requests:
            if request.request_id not in engine.aborted:
                assert engine.tokens[request.request_id] == request.max_tokens
        if blocks == 4096:  # no row lost its memory: each token is counted once, however often rows left
            assert scheduler.traffic.offline_tokens == engine.offline_computed
            assert scheduler.iterations.worth.step > 0
            assert scheduler.offline_tokens.work == pytest.approx(engine.offline_work)


class TestTheWorkersParts:
    def test_metadata_of_some_requests_is_as_if_the_others_had_never_been(self) -> None:
        import torch
        from vllm.v1.attention.backend import CommonAttentionMetadata

        from conserve.engine.vllm.preemption.rows import of_requests

        dice = random.Random(0)
        for _ in range(50):
            lengths = [dice.randint(1, 30) for _ in range(dice.randint(1, 8))]
            context = [dice.randint(0, 99) for _ in lengths]
            tables = torch.randint(0, 500, (len(lengths), 9))
            slots = torch.randperm(sum(lengths))
            starts = [sum(lengths[:n]) for n in range(len(lengths))]

            def of(kept: list[int]) -> Any:
                own = [lengths[n] for n in kept]  # noqa: B023
                ends = torch.tensor([0, *own]).cumsum(0).to(torch.int32)
                sequences = torch.tensor([context[n] + lengths[n] for n in kept])  # noqa: B023
                tokens = [starts[n] + at for n in kept for at in range(lengths[n])]  # noqa: B023
                return CommonAttentionMetadata(
                    query_start_loc=ends,
                    query_start_loc_cpu=ends,
                    seq_lens=sequences,
                    num_reqs=len(kept),
                    num_actual_tokens=len(tokens),
                    max_query_len=max(own),
                    max_seq_len=int(sequences.max()),
                    block_table_tensor=tables[kept],  # noqa: B023
                    slot_mapping=slots[tokens],  # noqa: B023
                    seq_lens_cpu_upper_bound=sequences,
                )

            kept = sorted(dice.sample(range(len(lengths)), dice.randint(1, len(lengths))))
            tokens = torch.tensor([starts[n] + at for n in kept for at in range(lengths[n])])
            cut, wanted = of_requests(of(list(range(len(lengths)))), torch.tensor(kept), tokens), of(kept)
            for part in vars(wanted):
                one, other = getattr(cut, part), getattr(wanted, part)
                assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other, part

    def test_all_ranks_hear_what_the_first_reads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from conserve.engine.runtime.safepoint import LeaveFlag
        from conserve.engine.vllm.iteration import Stamp
        from conserve.engine.vllm.preemption import worker

        wire: list[int] = []

        def orders(rank: int, size: int) -> Any:
            def broadcast(word: int | None) -> int:
                wire.append(word) if word is not None else None
                return wire[-1]

            tp = SimpleNamespace(world_size=size, rank_in_group=rank, broadcast_object=broadcast)
            monkeypatch.setattr(worker, "get_tp_group", lambda: tp)
            return worker.TensorParallelOrders()

        alone, first, second = orders(0, 1), orders(0, 2), orders(1, 2)
        with LeaveFlag.create() as flag:
            stamp = Stamp(iteration=3, flag=flag.name, rows=["a"], every=1)
            assert alone.rows_ordered(stamp) == 0
            flag.raise_for(3, 2)
            assert [one.rows_ordered(stamp) for one in (alone, first, second)] == [2, 2, 2]
        lost = Stamp(iteration=3, flag="psm_of_another_machine", rows=["a"], every=1)
        assert [one.rows_ordered(lost) for one in (alone, first, second, alone)] == [0, 0, 0, 0]


@contextmanager
def real_flag(engine: Any) -> Iterator[None]:
    """The worker reads the shared word, and not what the test says."""
    engine.worker._safepoints._orders = engine.real_orders
    try:
        yield
    finally:
        engine.worker._safepoints._orders = engine.orders


class Arrivals(Asking):
    """Implements `safepoints.Orders`: the shared word, read after a request has come in another thread."""

    def __init__(self, engine: Any, asked: Sequence[Any], seed: int) -> None:
        self._engine, self._asked, self._dice = engine, list(asked), random.Random(seed)
        self._thread = ThreadPoolExecutor(1)
        self._come: list[Any] = []
        self._iteration = self._at = self._layer = 0
        self.midway = 0

    @property
    def left(self) -> bool:
        return bool(self._asked or self._come)

    def taken(self) -> list[Any]:
        """Requests for the main thread; one comes between two iterations where none has run for it to come in."""
        if not self._engine.busy and self._asked:
            self._arrive()
        come, self._come = self._come, []
        return come

    def asked(self, stamp: Any) -> int:
        if stamp.iteration != self._iteration:
            self._iteration, self._layer, self._at = stamp.iteration, -1, self._dice.randrange(LAYERS)
        self._layer += 1
        if self._layer == self._at and stamp.rows and self._asked:
            self._arrive()
            self.midway += 1
        return int(self._engine.real_orders.rows_ordered(stamp))

    def _arrive(self) -> None:
        self._come.append(self._thread.submit(self._engine.prepared, self._asked.pop(0)).result(timeout=120))

    def close(self) -> None:
        self._thread.shutdown()


@contextmanager
def arrivals(engine: Any, asked: Sequence[Any], *, seed: int) -> Iterator[Arrivals]:
    """Requests that come at random layers of iterations, one an iteration, in a thread of their own."""
    coming = Arrivals(engine, asked, seed)
    engine.worker._safepoints._orders = coming
    try:
        yield coming
    finally:
        engine.worker._safepoints._orders = engine.orders
        coming.close()


def storm(engine: Any, preemptions: int, *, kinds: int = 40, longest: int = 12, losing: float = 0.05) -> int:
    """Preempt at random for long, under load and with aborts; returns how often rows lost their memory."""
    from tests.preempted_engine import Dice

    dice = random.Random(preemptions)
    asks = storm_asks(kinds, longest)
    wanted = engine.undisturbed(asks)
    before = counts(engine)
    engine.orders.follow(Dice(preemptions, LAYERS, often=0.9, whole=0.02))
    lost, live = engine.lost, dict[str, Any]()
    done = names = aborted = 0
    resident: list[int] = []

    def take(answers: dict[str, Any]) -> None:
        nonlocal done
        for name, answer in answers.items():
            assert answer == wanted[live.pop(name).name], name
            done += 1
        answers.clear()

    # In few steps, as where each takes many preemptions, no request may be aborted or lose its memory.
    while (
        (count := (counts(engine) - before)["iterations_left"]) < preemptions
        or not aborted
        or (losing and engine.lost == lost)
    ):
        while len(live) < 10 and dice.random() < 0.5:
            ask = dice.choice(asks)
            names += 1
            live[f"r{names}"] = ask
            engine.add(ask._replace(name=f"r{names}"))
        if live and dice.random() < 0.03:
            name = dice.choice(sorted(live))
            engine.abort(name)
            del live[name]
            aborted += 1
        if dice.random() < losing:
            engine.lose_memory(dice)
        if dice.random() < 0.002:
            engine.llm.reset_prefix_cache()  # refused while requests run, and harmless
        engine.step()
        take(engine.answers)
        if len(resident) <= 10 * count // preemptions:
            resident.append(psutil.Process().memory_info().rss)
    engine.orders.follow(None)
    take(engine.drain())
    assert not live
    engine.assert_nothing_is_left()
    engine.forget()
    assert done > preemptions // 100
    if preemptions >= 2000:  # what vLLM and the last minute's statistics take has been taken by then
        assert max(resident[5:]) - resident[3] < 32 << 20, [size >> 20 for size in resident]
    return int(engine.lost - lost)


def storm_asks(kinds: int, longest: int) -> list[Any]:
    """Requests of all kinds; many begin alike."""
    from tests.preempted_engine import Ask, greedy, prompt

    dice = random.Random(0)
    prefixes = [[], *(prompt(dice.randrange(40, 200), 600 + n) for n in range(3))]
    asks = []
    for n in range(kinds):
        tokens, most = int(10 ** dice.uniform(0.3, 2.3)), dice.randint(1, longest)
        ask = prompt(tokens, 700 + n, dice.choice(prefixes))
        asks.append(Ask(f"kind{n}", ask, greedy(most), offline=dice.random() < 0.7))
    return asks


@pytest.mark.parametrize("queued", [False, True])
def test_the_output_of_an_abandoned_iteration_waits_for_no_sample_unless_vllm_asks_for_one(
    queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arrival would wait for another call of the worker."""
    from conserve.engine.vllm.iteration import IterationOutcome, outcome_of
    from conserve.engine.vllm.preemption.outputs import nothing_sampled
    from conserve.engine.vllm.preemption.worker import Worker

    told = IterationOutcome(left=frozenset({"row"}))

    def abandoned(worker: Any, scheduler_output: Any) -> None:
        worker._abandoned, worker._outcome = nothing_sampled(["row"]), told

    monkeypatch.setattr(Worker, "_run", abandoned)
    worker = Worker.__new__(Worker)
    worker._queued = queued
    output = worker.execute_model(object())
    if queued:
        assert output is None
        output = worker.sample_tokens(None)
    assert output.req_ids == ["row"]
    assert output.sampled_token_ids == [[]]
    assert outcome_of(output) is told
    assert worker._abandoned is None
