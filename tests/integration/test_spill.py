"""An engine goes on with the KV that another one left on disk, and its answers are what they would have been."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conserve.engine.runtime.spill_file import INDEX
from tests.tiers import in_full
from tests.tiny_models import build_tiny_model
from tests.warned import OF_VLLM

pytestmark = [
    pytest.mark.engine,
    *OF_VLLM,
]

LAYERS = 3
BLOCK = 32
NEW = 40  # tokens of each answer
ANSWERS: dict[Any, Any] = {}  # of all engines of this module to rows that nothing disturbs


@pytest.fixture(scope="module")
def three_layers(few_words: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("three"), tokenizer_from=few_words, layers=LAYERS)


@contextmanager
def spilling_engine(model: Path, folder: Path, *, host_bytes: int = 32 << 20, **flags: Any) -> Iterator[Any]:
    from vllm.config import KVTransferConfig

    from tests.preempted_engine import started

    transfer = KVTransferConfig(
        kv_connector="CheckpointConnector",
        kv_connector_module_path="conserve.vllm",
        kv_role="kv_producer",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"policy": "eager", "host_bytes": host_bytes, "spill": str(folder)},
    )
    with started(model, kv_transfer_config=transfer, **flags) as engine:
        engine._undisturbed = ANSWERS
        yield engine


def ask(engine: Any, what: str) -> dict[str, Any]:
    from conserve.engine.vllm.checkpoint.spill import ask_spilling

    said = ask_spilling(engine.core, what)
    assert said is not None
    return said


def spill(engine: Any, meanwhile: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Save as at a clean stop: rows go on while it is written."""
    said = ask(engine, "begin")
    give_up_at = time.monotonic() + 240
    while said["writing"]:
        assert time.monotonic() < give_up_at
        meanwhile()
        said = ask(engine, "end")
    return said


def rows() -> list[Any]:
    """The longest is 301 tokens; two begin alike."""
    from tests.preempted_engine import Ask, greedy, prompt

    shared = prompt(70, 1)
    asked = [Ask(f"off{n}", prompt(30 + n * 67 % 190, 10 + n), greedy(NEW)) for n in range(4)]
    asked += [Ask(f"alike{n}", prompt(20 + n, 20 + n, shared), greedy(NEW)) for n in range(2)]
    return [*asked, Ask("long", prompt(301, 30), greedy(NEW))]


class Left:
    """State of an engine's rows when it stopped, and their expected answers."""

    def __init__(self, engine: Any, asked: Sequence[Any], wanted: dict[str, Any]) -> None:
        self.asked, self.wanted = asked, wanted
        requests = {name.rpartition("-")[0]: one for name, one in engine.scheduler.requests.items()}
        self.tokens = {ask.name: list(requests[ask.name].output_token_ids) for ask in asked}

    def again(self) -> list[Any]:
        """The rows as the job store brings them back."""
        from tests.preempted_engine import greedy

        return [
            ask._replace(
                prompt=[*ask.prompt, *self.tokens[ask.name]], params=greedy(NEW - len(self.tokens[ask.name]))
            )
            for ask in self.asked
        ]

    def finished_by(self, engine: Any) -> int:
        """Have another engine go on with the rows and compare; returns how many tokens it computed."""
        engine.orders.follow(None)
        with engine.counting_tokens() as computed:
            engine.add(*self.again())
            answers = engine.drain()
        engine.assert_nothing_is_left()
        for ask in self.asked:
            whole = (*self.tokens[ask.name], *answers[ask.name].tokens)
            assert whole == self.wanted[ask.name].tokens, ask.name
        assert len(set(computed)) == 1
        return int(computed[0])

    @property
    def to_compute(self) -> int:
        """Tokens with nothing kept: all but each row's last."""
        return sum(len(ask.prompt) + NEW - 1 for ask in self.asked)


def run_until_some_are_under_way(engine: Any, *, lose: bool) -> Left:
    """Rows decode, one is evicted and has its checkpoint alone, one is not through its prompt."""
    asked = rows()
    wanted = engine.undisturbed(asked)
    engine.add(*asked[:-1])
    for _ in range(10):
        engine.step()
    if lose:
        scheduler = engine.scheduler
        victim = next(one for one in scheduler.running if one.num_computed_tokens > 2 * BLOCK)
        scheduler.running.remove(victim)
        scheduler._preempt_request(victim, time.monotonic())
    engine.add(asked[-1])
    engine.step()
    return Left(engine, asked, wanted)


def spilled_by_one(
    model: Path, folder: Path, *, lose: bool = False, **flags: Any
) -> tuple[Left, dict[str, Any]]:
    with spilling_engine(model, folder, **flags) as engine:
        left = run_until_some_are_under_way(engine, lose=lose)
        said = spill(engine, engine.step)
        engine.drain()
        engine.assert_nothing_is_left()
        memory = engine.scheduler.checkpoints.memory
        assert memory.room == memory.capacity, "host memory is held"
        return left, said


@pytest.mark.parametrize("lose", [pytest.param(False, marks=pytest.mark.full), True])
def test_rows_go_on_without_computing_again_what_was_spilled(
    three_layers: Path, tmp_path: Path, lose: bool
) -> None:
    left, said = spilled_by_one(three_layers, tmp_path, lose=lose)
    assert said["refused"] is None
    assert said["blocks_spilled"] > 20
    assert said["bytes_spilled"] == sum(path.stat().st_size for path in tmp_path.glob("*.kv"))
    with spilling_engine(three_layers, tmp_path) as engine:
        said = {**said, **ask(engine, "take_in")}
        assert not list(tmp_path.iterdir()), "a spill is used once"
        assert said["blocks_taken_in"] >= 20
        computed = left.finished_by(engine)
        report = engine.scheduler.conserve()["checkpoint"]
        assert report["spill"]["blocks_taken_in"] == said["blocks_taken_in"]
        # Two blocks are in two rows: the second row waits until the first has them back.
        assert report["tokens_restored"] >= said["tokens_taken_in"]
        assert computed == left.to_compute - report["tokens_restored"] - 2 * BLOCK


@pytest.mark.full  # tests/property/test_spill.py damages every file in every way
def test_what_is_damaged_is_refused_and_computed_again(three_layers: Path, tmp_path: Path) -> None:
    left, _ = spilled_by_one(three_layers, tmp_path)
    (shard,) = tmp_path.glob("*.kv")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with spilling_engine(three_layers, tmp_path) as engine:
        said = ask(engine, "take_in")
        assert said["refused"].endswith(f"of {shard.name} is not what was written")
        assert said["blocks_taken_in"] == 0
        memory = engine.scheduler.checkpoints.memory
        assert (memory.used, memory.room) == (0, memory.capacity)
        assert engine.scheduler.conserve()["checkpoint"]["spill"]["refused"] == said["refused"]
        computed = left.finished_by(engine)
        restored = engine.scheduler.conserve()["checkpoint"]["tokens_restored"]
        # Two rows have two blocks in common, which the second may find in the prefix cache.
        assert left.to_compute - restored - computed in (0, 2 * BLOCK)
        assert restored <= 2 * BLOCK


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"max_model_len": 512}, "it is of another engine, whose context length is 1024 and not 512"),
        *in_full(
            ({"block_size": 64}, "it is of another engine, whose block size is 32 and not 64"),
            (
                {"prefix_caching_hash_algo": "sha256_cbor"},
                "it is of another engine, whose hash algorithm is sha256 and not sha256_cbor",
            ),
        ),
    ],
)
def test_another_engines_is_refused(
    three_layers: Path, left_on_disk: Path, flags: dict[str, Any], why: str
) -> None:
    with spilling_engine(three_layers, left_on_disk, **flags) as engine:
        said = ask(engine, "take_in")
        assert (said["refused"], said["blocks_taken_in"]) == (why, 0)
        assert (left_on_disk / INDEX).exists(), "it stays for the engine that it is of"


@pytest.fixture(scope="module")
def left_on_disk(three_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("left")
    spilled_by_one(three_layers, folder)
    return folder


def test_weights_that_changed_meanwhile_are_another_engines(three_layers: Path, left_on_disk: Path) -> None:
    with spilling_engine(three_layers, left_on_disk) as engine:
        engine.core.set_weight_version("step 7")
        assert ask(engine, "take_in")["refused"] == (
            "it is of another engine, whose weight version is default and not step 7"
        )


def test_without_prefix_caching_nothing_is_spilled(three_layers: Path, tmp_path: Path) -> None:
    with spilling_engine(three_layers, tmp_path, enable_prefix_caching=False) as engine:
        engine.add(rows()[-1])
        engine.step()
        engine.step()
        said = spill(engine)
        assert (said["why_off"], said["blocks_spilled"]) == ("prefix caching is off", 0)
        assert ask(engine, "take_in")["blocks_taken_in"] == 0
        engine.drain()
    assert not list(tmp_path.iterdir())


def test_hashes_that_differ_from_start_to_start_name_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from conserve.engine.vllm.checkpoint.spill import why_not

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    cache = SimpleNamespace(enable_prefix_caching=True, prefix_caching_hash_algo="xxhash_cbor")
    parallel = SimpleNamespace(data_parallel_size=1, data_parallel_index=0)
    config = SimpleNamespace(cache_config=cache, parallel_config=parallel)
    assert why_not(config) == (
        "hashes of blocks differ from start to start with xxhash_cbor (PYTHONHASHSEED is not set)"
    )
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert why_not(config) is None
    for several in ({"data_parallel_size": 2}, {"data_parallel_index": 1}):
        vars(parallel).update(data_parallel_size=1, data_parallel_index=0)
        vars(parallel).update(several)
        assert why_not(config) == "the engine is data parallel"


def test_the_longest_rows_beginning_goes_first_where_memory_is_little(
    three_layers: Path, tmp_path: Path
) -> None:
    block_bytes = LAYERS * 2 * BLOCK * 64 * 4
    left, said = spilled_by_one(three_layers, tmp_path, host_bytes=5 * block_bytes)
    assert said["blocks_spilled"] <= 5
    with spilling_engine(three_layers, tmp_path, host_bytes=3 * block_bytes) as engine:
        taken = ask(engine, "take_in")["blocks_taken_in"]
        assert taken == min(3, said["blocks_spilled"])  # the next engine has less memory still
        left.finished_by(engine)


def dead(*args: Any, **more: Any) -> Any:
    raise RuntimeError("a worker died")


def test_a_disk_without_room_for_others_is_left_alone(
    three_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from conserve.engine.vllm.checkpoint import spill as module

    with spilling_engine(three_layers, tmp_path) as engine:
        left = run_until_some_are_under_way(engine, lose=False)
        monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=module.RESERVE))
        said = spill(engine)
        assert re.fullmatch(r"they take \d MiB, and 1024 are free, 1024 of them for others", said["refused"])
        monkeypatch.undo()
        executor = engine.core.model_executor
        monkeypatch.setattr(executor, "collective_rpc", dead)
        assert spill(engine)["refused"] == "RuntimeError: a worker died"
        monkeypatch.undo()
        assert spill(engine)["refused"] is None
        assert json.loads((tmp_path / INDEX).read_text())
        answers = engine.drain()
        assert {name: answer.tokens for name, answer in answers.items()} == {
            name: left.wanted[name].tokens for name in answers
        }
        engine.assert_nothing_is_left()
