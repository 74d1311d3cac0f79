"""Composer: time, tokens, slots, KV blocks and shared prefixes of a batch in the making."""

from math import inf

import pytest

from conserve.engine.policy.composer import Composer
from conserve.engine.policy.view import Candidate, Image
from conserve.profiles.conserve import ConServeModel
from conserve.profiles.correction import CorrectedModel
from conserve.profiles.hygen import HyGenModel
from conserve.profiles.model import smallest_ms
from tests.policy_views import FRESH, MS_PER_TOKEN, add_steps, decodes, fitting, view_of

ROWS = tuple(Candidate(f"row{n}", 1, 60, True, 4) for n in range(3))
SEEING = Candidate("seeing", 100, 0, images=(Image(20, 40.0), Image(60, 40.0)))
DEAR = Candidate("dear", 10, 0, surcharge_ms=4.0)  # 5 ms a token


def alike(name: str, context: int, tokens: int) -> Candidate:
    """A request whose first 128 tokens, eight KV blocks, are equal in all such requests."""
    return Candidate(name, tokens, context, prefix=[f"p{n}" for n in range(8)])


class TestSharedBlocks:
    """Requests that begin alike compute their common KV blocks once, or bring them back once."""

    @pytest.mark.parametrize(
        ("context", "computed"), [(0, False), (16, False), (32, True), (48, True), (64, True), (80, False)]
    )
    def test_the_batch_computes_the_blocks_that_a_chunk_touches(self, context: int, computed: bool) -> None:
        composer = Composer(view_of())
        composer.add(alike("first", 32, 40), 40)  # the third block, the fourth, and half of the fifth
        assert composer.computes_next_of(alike("second", context, 40)) == computed

    def test_a_prompt_that_is_cut_computes_those_of_its_chunk(self) -> None:
        composer = Composer(view_of())
        composer.add(alike("first", 0, 100), 20)
        assert composer.computes_next_of(alike("second", 16, 40))
        assert not composer.computes_next_of(alike("second", 32, 40))

    @pytest.mark.parametrize("context", [0, 32])
    def test_a_block_helps_a_request_that_has_a_token_to_compute_after_it(self, context: int) -> None:
        composer = Composer(view_of())
        composer.add(alike("first", 0, 128), 128)
        assert not composer.computes_next_of(alike("second", context, 16))
        assert composer.computes_next_of(alike("second", context, 17))

    @pytest.mark.parametrize(
        ("context", "comes"), [(0, False), (16, False), (32, True), (48, False), (64, False)]
    )
    def test_only_full_blocks_come_back_for_other_requests(self, context: int, comes: bool) -> None:
        composer = Composer(view_of())
        composer.restore(alike("first", 32, 30))  # the third block, and 14 tokens of the fourth
        assert composer.comes_for_others(alike("second", context, 40)) == comes


class TestRoom:
    """Each request takes its tokens, its slot and its KV blocks from what is free."""

    def test_a_request_that_starts_with_a_chunk_has_blocks_for_all_of_its_prompt(self) -> None:
        composer = Composer(view_of())
        composer.admit(FRESH, 20)
        assert composer.free_blocks == 1000 - 7
        assert (composer.tokens_left, composer.free_slots) == (2048 - 20, 49)

    @pytest.mark.parametrize(("limit_ms", "tokens"), [(20.0, 20), (60.0, 50), (200.0, 100)])
    def test_a_prompt_that_gets_more_tokens_keeps_the_blocks_that_it_has(
        self, limit_ms: float, tokens: int
    ) -> None:
        composer = Composer(view_of())
        composer.admit(FRESH, 20)
        composer.extend(FRESH, limit_ms)
        assert composer.tokens == {"fresh": tokens}
        assert (composer.free_blocks, composer.tokens_left) == (1000 - 7, 2048 - tokens)

    def test_a_running_prompt_gets_the_tokens_that_it_has_blocks_for(self) -> None:
        running = FRESH._replace(name="running", blocks=2)
        composer = Composer(view_of(free_blocks=3))
        composer.add(running, 20)
        assert composer.free_blocks == 3
        composer.extend(running, 200.0)
        assert (composer.tokens, composer.free_blocks) == ({"running": 20}, 3)
        composer = Composer(view_of(free_blocks=5))
        composer.add(running, 20)
        composer.extend(running, 200.0)
        assert (composer.tokens, composer.free_blocks) == ({"running": 100}, 0)

    def test_each_restored_request_takes_a_slot_and_all_of_them_take_one_token(self) -> None:
        composer = Composer(view_of())
        for count in (1, 2):
            composer.restore(Candidate(f"row{count}", 100, 0, restorable=99))
            assert composer.free_slots == 50 - count
            assert composer.free_blocks == 1000 - 7 * count
            assert composer.tokens_left == 2048 - 1

    def test_victims_that_have_exactly_the_missing_blocks_are_enough(self) -> None:
        composer = Composer(view_of(free_blocks=3))
        assert composer.make_room([*ROWS[:1]], 7)
        assert (composer.evicted, composer.free_blocks) == (["row0"], 7)

    def test_a_victim_for_each_missing_slot_is_enough(self) -> None:
        composer = Composer(view_of(free_slots=-1, parks=True))
        assert composer.make_room([*ROWS[:2]], 0, slots=1)
        assert (composer.parked, composer.evicted, composer.free_slots) == (["row1", "row0"], [], 1)

    @pytest.mark.parametrize("gives_up", ["park", "evict"])
    def test_a_row_that_gives_its_slot_up_gives_up_its_adapter(self, gives_up: str) -> None:
        adapters = {"row0": 1, "row1": 1, "wants": 2}
        composer = Composer(view_of(offline=ROWS[:2], adapters=adapters, most_adapters=1))
        wants = Candidate("wants", 10, 0)
        for row in ROWS[:2]:
            assert not composer.adapter_fits(wants)
            getattr(composer, gives_up)(row)
        assert composer.adapter_fits(wants)

    def test_a_running_request_needs_no_further_slot(self) -> None:
        composer = Composer(view_of(free_slots=0))
        assert composer.make_room([*ROWS], 7)
        assert not composer.evicted

    @pytest.mark.parametrize(("victim", "reserved"), [("saved", 10), ("own", 6)])
    def test_the_blocks_of_a_saved_row_count_as_free_until_the_row_is_evicted(
        self, victim: str, reserved: int
    ) -> None:
        """Ten blocks are reserved, and the saved row holds four that can be had at any time."""
        rows = {"saved": ROWS[0]._replace(saved=True), "own": ROWS[1]}
        composer = Composer(view_of(reserved_blocks=10, offline=[*rows.values()]))
        assert composer.reserved_blocks == 6
        composer.evict(rows[victim])
        assert composer.reserved_blocks == reserved

    @pytest.mark.parametrize(("wanted", "reserved"), [(5, 1), (4, 0), (3, 0)])
    def test_no_block_is_reserved_where_those_of_saved_rows_are_enough(
        self, wanted: int, reserved: int
    ) -> None:
        view = view_of(reserved_blocks=wanted, offline=[ROWS[0]._replace(saved=True)])
        assert Composer(view).reserved_blocks == reserved


class TestTime:
    """Tokens fit as long as the latency model and the requests' surcharges say so."""

    def test_surcharges_are_part_of_the_time_a_batch_takes(self) -> None:
        composer = Composer(view_of())
        composer.add(DEAR, 10)
        assert composer.predicted_ms == composer.plan().predicted_ms == 10 + 10 + 40

    def test_a_plan_says_what_its_live_requests_would_take_alone(self) -> None:
        composer = Composer(view_of())
        composer.add(Candidate("live", 30, 0), 30)
        assert composer.plan().online_ms == composer.plan().predicted_ms == 10 + 30
        composer.begin_offline(inf)
        composer.add(ROWS[0], 1)
        plan = composer.plan()
        assert (plan.online_ms, plan.predicted_ms) == (40, 41)
        dear, rows = Composer(view_of()), Composer(view_of())
        dear.add(DEAR, 10)
        for other in (dear, rows):
            other.begin_offline(inf)
            other.add(ROWS[0], 1)
        assert (dear.plan().online_ms, dear.plan().predicted_ms) == (60, 61), (
            "with what its tokens cost beyond"
        )
        assert (rows.plan().online_ms, rows.plan().predicted_ms) == (0, 11)

    @pytest.mark.parametrize(("limit_ms", "cheap", "dear"), [(59.0, 0, 0), (60.0, 0, 0), (75.0, 15, 3)])
    def test_tokens_fit_into_the_time_that_the_batch_and_its_surcharges_leave(
        self, limit_ms: float, cheap: int, dear: int
    ) -> None:
        composer = Composer(view_of())
        composer.add(DEAR, 10)  # 60 ms
        assert composer.token_budget(FRESH, limit_ms) == cheap
        assert composer.token_budget(DEAR._replace(name="other"), limit_ms) == dear

    def test_no_more_tokens_fit_than_the_request_has_and_the_iteration_holds(self) -> None:
        for request in (DEAR, DEAR._replace(surcharge_ms=0.0)):
            for limit_ms in (1000.0, inf):
                assert Composer(view_of()).token_budget(request, limit_ms) == 10
                assert Composer(view_of(max_tokens=7)).token_budget(request, limit_ms) == 7

    @pytest.mark.parametrize("limit_ms", [1000.0, inf])
    def test_no_prompt_fits_beside_decode_steps_that_fill_or_exceed_the_iteration(
        self, limit_ms: float
    ) -> None:
        for steps in (2, 3):
            composer = Composer(view_of(max_tokens=2))
            add_steps(composer, decodes(steps))
            assert composer.token_budget(FRESH, limit_ms) == 0

    @pytest.mark.parametrize(
        ("weights", "least_ms"),
        [
            ((1, 0, 0, 0, 0, 0, 0, 10), 11.0),
            ((1, 0, 0, 0, 0, 5, 0, 10), 11.0),  # a prompt would take 5 ms more
            ((1, 0, 0, 0.25, 0, 0, 0, 10), 11.25),  # of a context without a token
        ],
    )
    def test_there_is_time_where_the_shortest_decode_step_fits(
        self, weights: tuple[float, ...], least_ms: float
    ) -> None:
        composer = Composer(view_of(model=ConServeModel.of(*weights)))
        assert not composer.has_time(least_ms - 0.01)
        assert composer.has_time(least_ms)
        assert Composer(view_of(model=CorrectedModel(MS_PER_TOKEN))).has_time(inf)
        dear = Composer(view_of())
        dear.add(DEAR, 10)
        assert [dear.has_time(limit_ms) for limit_ms in (60.9, 61.0)] == [False, True]

    def test_a_decode_step_fits_where_a_prompt_does_not(self) -> None:
        composer = Composer(view_of(model=ConServeModel.of(1, 0, 0, 0, 0, 5, 0, 10)))  # a prompt: 5 ms more
        (step,) = decodes(1)
        assert composer.token_budget(step, 11.0) == 1
        assert composer.token_budget(step._replace(decode=False), 11.0) == 0

    @pytest.mark.parametrize(
        ("limit_ms", "tokens"),
        [
            (10.0, 0),
            (25.0, 15),
            (30.0, 20),  # up to the first image, of 40 ms
            (70.0, 20),
            (71.0, 21),
            (100.0, 50),
            (130.0, 60),  # up to the second one
            (151.0, 61),
            (500.0, 100),
            (inf, 100),
        ],
    )
    def test_a_row_gets_the_tokens_before_the_first_image_that_finds_no_time(
        self, limit_ms: float, tokens: int
    ) -> None:
        composer = Composer(view_of())
        composer.is_turn = True
        assert composer.row_budget(SEEING, limit_ms) == tokens
        assert composer.token_budget(SEEING, limit_ms) == max(tokens, min(100, limit_ms - 10))
        composer.add(SEEING, tokens)
        assert composer.predicted_ms <= limit_ms

    def test_one_image_may_take_longer_where_no_live_request_waits(self) -> None:
        composer = Composer(view_of())
        composer.begin_offline(50.0)
        assert composer.row_budget(SEEING, 50.0) == 40
        assert composer.row_budget(SEEING, 80.0) == 60, "the second one has to fit"
        assert composer.row_budget(SEEING, 151.0) == 100, "the first one takes none of its time"
        composer.add(SEEING, 40)
        assert composer.predicted_ms == 10 + 40 + 40
        assert composer.row_budget(SEEING._replace(name="other"), 115.0) == 20

    def test_an_image_can_be_encoded_if_it_fits_beside_the_live_requests_alone(self) -> None:
        for limit_ms, fits in ((53.9, False), (54.0, True), (inf, True)):
            composer = Composer(view_of())
            add_steps(composer, decodes(3))
            composer.begin_offline(limit_ms)
            add_steps(composer, decodes(20, "row"))
            assert composer.can_encode(SEEING, limit_ms) == fits
            assert composer.can_encode(FRESH, limit_ms)

    def test_the_longest_of_its_images_is_what_a_row_needs_time_for(self) -> None:
        two = SEEING._replace(images=(Image(20, 10.0), Image(60, 40.0)))
        composer = Composer(view_of())
        add_steps(composer, decodes(3))
        composer.begin_offline(50.0)
        assert not composer.can_encode(two, 50.0)
        assert composer.can_encode(two._replace(images=two.images[:1]), 50.0)

    def test_one_image_alone_may_take_longer_whatever_rows_without_one_are_beside(self) -> None:
        plain, other = Candidate("plain", 5, 0), SEEING._replace(name="other")
        for first, tokens, budget in ((SEEING, 40, 20), (SEEING, 20, 55)):  # with its image, and up to it
            composer = Composer(view_of())
            composer.begin_offline(50.0)
            composer.add(first, tokens)
            composer.add(plain, 5)
            assert composer.row_budget(other, 10 + tokens + 40 * (tokens > 20) + 5 + 55) == budget

    def test_an_image_of_any_length_is_encoded_where_no_live_request_waits(self) -> None:
        composer = Composer(view_of())
        composer.begin_offline(50.0)
        assert composer.can_encode(SEEING._replace(images=(Image(0, 1000.0),)), 50.0)

    def test_an_image_of_a_live_request_takes_the_time_of_rows(self) -> None:
        composer = Composer(view_of())
        composer.add(SEEING, 100)
        composer.begin_offline(240.0)
        assert composer.predicted_ms == 190
        assert not composer.can_encode(SEEING._replace(name="row", images=(Image(0, 50.0),)), 240.0)
        assert composer.can_encode(SEEING._replace(name="row", images=(Image(0, 49.0),)), 240.0)
        assert composer.alone_ms(SEEING) == composer.longer_ms(SEEING, 100) + 10 == 190
        assert composer.longer_ms(SEEING, 20) == 20

    def test_an_image_is_taken_out_with_the_tokens_that_reach_it(self) -> None:
        composer = Composer(view_of())
        composer.is_turn = True
        composer.add(SEEING, 30)
        composer.extend(SEEING, 100.0)
        assert (composer.tokens["seeing"], composer.predicted_ms) == (50, 100)

    def test_a_model_that_corrects_itself_plans_without_a_limit_too(self) -> None:
        """A corrected model has no margin for an infinite time."""
        composer = Composer(view_of(model=CorrectedModel(MS_PER_TOKEN)))
        assert composer.token_budget(FRESH, inf) == 100
        assert fitting(composer, decodes(3), inf) == 3


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_speculative_steps_are_added_at_once_as_they_would_be_one_by_one(tokens: int) -> None:
    steps = [step._replace(tokens=tokens) for step in decodes(2)]
    at_once, one_by_one = Composer(view_of()), Composer(view_of())
    add_steps(at_once, steps)
    for step in steps:
        one_by_one.add(step, tokens)
    assert at_once.plan() == one_by_one.plan()
    assert at_once.plan().total == 2 * tokens


def test_the_smallest_iteration_is_the_dearer_of_a_prompt_token_and_a_decode_step() -> None:
    prompts_are_dearer = ConServeModel.of(1, 0, 0, 100, 0, 5, 0, 10)  # 100 ms for each token that is read
    assert smallest_ms(prompts_are_dearer) == 1 + 100 + 5 + 10
    steps_are_dearer = HyGenModel.of(1, 3, 0, 0, 0, 0, 10)
    assert smallest_ms(steps_are_dearer) == 3 + 10
