"""Live conversations beside rows, on simulated time: a later turn finds what an earlier one has left."""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from conserve.bench.traces import Arrival
from tests.warned import OF_VLLM

pytestmark = [*OF_VLLM, pytest.mark.engine]

BLOCK = 16  # tokens
FIRST, MORE = 160, 32  # tokens of a first turn, and of each later one beyond it
TURNS, BETWEEN_S = 6, 8.0
BLOCKS = 400


class Turn(NamedTuple):
    """A turn of a conversation, whose prompt begins with that of the turn before."""

    at_s: float
    conversation: int
    turn: int
    output_tokens: int = 4

    @property
    def input_tokens(self) -> int:
        return FIRST + MORE * self.turn

    @property
    def prompt_ids(self) -> list[int]:
        return [self.conversation, *(n % 900 for n in range(self.input_tokens - 1))]


TALKS = sorted(Turn(n * 1.5 + turn * BETWEEN_S, n, turn) for n in range(4) for turn in range(TURNS))
ALONE = [Turn(at_s, 10 + n, 0) for n, (at_s, *_) in enumerate(TALKS)]  # as many, and none goes on
Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path, clock: Any) -> Make:
    """Engines on which rows fill the memory."""

    def make(share: float, *, rows: bool = True, window: int = 12, **settings: Any) -> Any:
        from conserve.engine.vllm.simulation.engine import SimulatedEngine
        from tests.bare_scheduler import MODEL, engine_config

        section = {
            "policy": "conserve",
            "preemption": "prompt",
            "harm": 0.1,
            "live_prefixes": share,
            **settings,
        }
        flags: dict[str, Any] = {"max_num_batched_tokens": 1024, "block_size": BLOCK}
        return SimulatedEngine(
            engine_config(tmp_path, section=section, **flags),
            clock=clock,
            model=MODEL,
            layers=4,
            num_blocks=BLOCKS,
            offline=cycle([(400, 8)]) if rows else iter(()),
            window=window,
            scatter=0.0,
            seed=0,
        )

    return make


def counts(engine: Any) -> dict[str, Any]:
    return dict(engine.scheduler.conserve()["live_prefixes"])


def play(engine: Any, turns: Any = TALKS) -> dict[str, Any]:
    answers = engine.play(turns)
    assert all(len(one.token_at_s) == 4 for one in answers)
    return counts(engine)


def test_later_turns_find_earlier_ones_beside_rows_as_without_them(make: Make) -> None:
    """Without blocks kept the same turns find next to nothing, and the report says how much they lost."""
    alone = play(make(0.5, rows=False))
    kept = play(make(0.5))
    lost = play(make(0.0))
    assert alone["found_tokens"] > 0.6 * alone["prompt_tokens"]
    assert alone["lost_tokens"] == 0
    assert kept["found_tokens"] >= 0.8 * alone["found_tokens"]
    assert lost["found_tokens"] < 0.2 * alone["found_tokens"]
    assert lost["lost_tokens"] == pytest.approx(alone["found_tokens"] - lost["found_tokens"], rel=0.1)
    assert kept["lost_tokens"] == pytest.approx(alone["found_tokens"] - kept["found_tokens"], rel=0.1)
    assert (lost["kept_blocks"], lost["share"]) == (0, 0.0)


def test_what_live_requests_found_is_recorded_with_their_lengths(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "arrivals.csv"
    engine = make(0.5, rows=False, record_arrivals=str(file))
    said = play(engine)
    engine.scheduler.shutdown()
    lines = [[*map(int, line.split(",")[1:])] for line in file.read_text().splitlines()]
    assert sum(cached for _, _, cached in lines) == said["found_tokens"] > 0
    assert all(cached < prompt for prompt, _, cached in lines)


def test_an_arrival_finds_as_much_as_is_said_of_it(make: Make) -> None:
    """The first one finds nothing, and none finds more than an earlier one has computed."""
    engine = make(0.5, rows=False)
    engine.play([Arrival(2.0 * n, 160, 4, cached) for n, cached in enumerate((96, 0, 64, 96, 128))])
    assert counts(engine)["found_tokens"] == 64 + 96 + 96


def test_nothing_is_kept_where_live_requests_reuse_nothing(make: Make) -> None:
    said = play(make(0.5), ALONE)
    assert said["found_tokens"] == said["lost_tokens"] == 0
    assert said["kept_blocks"] == said["most_blocks"] == 0


def test_before_any_reuse_is_seen_rows_leave_nothing_and_take_what_live_requests_left_last(
    make: Make,
) -> None:
    engine = make(0.5, window=1)
    assert play(engine, ALONE[:3])["kept_blocks"] == 0
    taken = engine.offline_tokens
    engine.go_on_until(engine.clock.now + 60.0)
    assert engine.offline_tokens - taken > 3 * BLOCK * BLOCKS, "more than the memory, several times"
    said = play(engine, [ALONE[0]._replace(turn=1)])
    assert (said["found_tokens"], said["lost_tokens"]) == (FIRST, 0)


def test_more_is_kept_than_rows_leave_where_they_do_not_need_it(make: Make) -> None:
    """Rows leave a tenth; few of them run, so that nine turns out of ten find what no row had a use for."""
    alone = play(make(0.5, rows=False))
    kept = play(make(0.1, window=1))
    assert kept["most_blocks"] <= 0.1 * BLOCKS
    assert kept["found_tokens"] >= 0.9 * alone["found_tokens"]


def test_no_more_is_kept_than_the_share_and_rows_go_on(make: Make) -> None:
    engine = make(0.1)
    rows = engine.offline_tokens
    said = play(engine)
    assert 0 < said["kept_blocks"] <= said["most_blocks"] <= 0.1 * BLOCKS
    assert engine.offline_tokens > rows


def test_what_is_not_asked_for_any_more_is_let_go(make: Make) -> None:
    engine = make(0.5)
    play(engine)
    assert counts(engine)["kept_blocks"]
    engine.clock.now += 2 * counts(engine)["most_age_s"]
    engine.go_on_until(engine.clock.now + 1.0)
    assert counts(engine)["kept_blocks"] == 0


def test_live_requests_take_kept_blocks_where_they_need_them(make: Make) -> None:
    engine = make(0.9)
    play(engine)
    before = counts(engine)["kept_blocks"]
    crowd = [Turn(0.0, 100 + n, 30) for n in range(6)]  # 70 blocks each
    assert all(len(one.token_at_s) == 4 for one in engine.play(crowd))
    assert before


def test_another_policy_keeps_nothing_and_the_first_one_begins_anew(make: Make) -> None:
    engine = make(0.5, control=True)
    play(engine)
    engine.scheduler.conserve({"policy": "priority"})
    assert counts(engine)["kept_blocks"] == 0
    engine.scheduler.conserve({"policy": "conserve"})
    play(engine)
    assert counts(engine)["kept_blocks"]


def test_a_prompt_is_counted_once_however_often_its_request_is_preempted(make: Make) -> None:
    """With the V2 model runner vLLM has a resumed request among the new ones."""
    engine = make(0.5, rows=False)
    scheduler = engine.scheduler
    scheduler.use_v2_model_runner = True
    live = engine.request(320, 20)
    scheduler.add_request(live)
    while not live.num_output_tokens:
        engine._iterate()
    before = counts(engine)
    scheduler.running.remove(live)
    scheduler._preempt_request(live, engine.clock.now)
    while not live.is_finished():
        engine._iterate()
    assert live.num_preemptions == 1
    after = counts(engine)
    assert [after[name] for name in ("prompt_tokens", "found_tokens")] == [
        before[name] for name in ("prompt_tokens", "found_tokens")
    ]
    assert after["prompt_tokens"] == 320


def test_a_cache_that_is_reset_is_forgotten(make: Make) -> None:
    engine = make(0.5, rows=False)
    found = play(engine)["found_tokens"]
    assert engine.scheduler.reset_prefix_cache()
    assert counts(engine)["kept_blocks"] == 0
    engine.play([Turn(0.0, 0, TURNS)])
    said = counts(engine)
    assert said["found_tokens"] == found
    assert said["lost_tokens"] == 0, "no row took anything"


def test_blocks_of_live_requests_that_a_reset_preempts_are_not_kept(make: Make) -> None:
    """They are empty behind it."""
    engine = make(0.5, rows=False)
    play(engine)
    live = engine.request(320, 20)
    engine.scheduler.add_request(live)
    while live.num_output_tokens < 2:
        engine._iterate()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert live.num_preemptions == 1
    assert engine.scheduler.prefixes._queue.kept == 0


def test_later_turns_beside_rows_get_the_answers_that_they_get_alone(few_layers: Path) -> None:
    """With a real worker: what was kept is what the earlier turn has computed."""
    from tests.preempted_engine import Ask, greedy, prompt, started

    talks = [prompt(270, seed) for seed in range(3)]
    asked = [
        [
            *(
                Ask(f"talk{n}-{turn}", talk[: 70 + 40 * turn], greedy(4), offline=False)
                for n, talk in enumerate(talks)
            ),
            *(Ask(f"row{n}-{turn}", prompt(300, 1000 * turn + n), greedy(4)) for n in range(4)),
        ]
        for turn in range(3)
    ]
    with started(
        few_layers, section={"live_prefixes": 0.5}, max_model_len=512, kv_cache_memory_bytes=2 << 20
    ) as engine:
        wanted = engine.undisturbed([ask for turn in asked for ask in turn])
        before = counts(engine)
        answers: dict[str, Any] = {}
        for turn in asked:
            answers |= engine.together(turn)
        said, blocks = counts(engine), engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        taken = sum(-(-304 // engine.scheduler.block_size) for turn in asked for ask in turn if ask.offline)
    assert answers == wanted
    assert said["found_tokens"] - before["found_tokens"] > 200
    assert 0 < said["kept_blocks"] <= said["most_blocks"]
    assert taken > blocks, "rows have taken more blocks than there are"
