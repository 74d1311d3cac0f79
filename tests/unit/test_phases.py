"""Phases of a plan: online requests first, then offline requests in order as far as they fit."""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from conserve.engine.policy.conserve import Conserve, arrival_limit_ms, bearable_ms
from conserve.engine.policy.offline import MOST_DEFERRED
from conserve.engine.policy.paced import Paced
from conserve.engine.policy.plan import Traits
from conserve.engine.policy.policies import BENCHED, POLICIES, SERVING, traits
from conserve.engine.policy.view import OFFLINE_PRIORITY, Candidate, Image, Slo
from conserve.names import CONSERVE
from conserve.profiles.conserve import ConServeModel
from tests.policy_views import FRESH, ROW, decodes, plan_of, view_of

PROMPT = Candidate("prompt", 100, 0)
SMALL = Candidate("small", 16, 0)  # one KV block
ROWS = tuple(Candidate(f"row{n}", 1, 60, True, 4) for n in range(3))
DEAR = Candidate("dear", 20, 0, surcharge_ms=29.0)  # 30 ms a token
CHEAP = Candidate("cheap", 20, 0)


def growing(count: int, blocks: int) -> list[Candidate]:
    """Running rows whose next token needs a KV block."""
    return [Candidate(f"row{n}", 1, 16 * blocks, True, blocks) for n in range(count)]


def alike(count: int) -> list[Candidate]:
    """Waiting rows with equal beginnings, seven KV blocks each."""
    return [Candidate(f"alike{n}", 100, 0, prefix=[f"p{n}" for n in range(6)]) for n in range(count)]


class TestOnlineShare:
    """Phase 1: the tokens of online requests, and the room left to phase 2."""

    def test_prompts_are_cut_to_the_tbt_only_beside_decode_steps(self) -> None:
        slo = Slo(ttft_ms=1000, tbt_ms=25)
        assert plan_of(waiting_online=[PROMPT], slo=slo).tokens == {"prompt": 100}
        assert plan_of(waiting_online=[PROMPT], slo=slo, online=decodes(1)).tokens["prompt"] == 14

    def test_a_prompt_under_way_has_its_slot(self) -> None:
        under_way = Candidate("prompt", 100, 32, False, 2)
        plan = plan_of(online=[under_way], offline=ROWS, free_slots=0)
        assert plan.tokens == {"prompt": 100, "row0": 1, "row1": 1, "row2": 1}
        assert (plan.admitted, plan.evicted) == ([], [])

    def test_decode_steps_take_missing_slots_from_the_last_rows(self) -> None:
        """Requests whose KV is on its way back take slots too, so there may be fewer than none."""
        plan = plan_of(online=decodes(1), offline=ROWS, free_slots=-1)
        assert plan.evicted == ["row2"]

    def test_a_restored_request_needs_a_single_free_token_of_the_iteration(self) -> None:
        back = PROMPT._replace(restorable=99)
        assert plan_of(waiting_online=[back], max_tokens=1).restored == ["prompt"]

    @pytest.mark.parametrize(
        ("age_ms", "answered", "limit_ms"), [(950, False, 50), (950, True, 110), (0, False, 110)]
    )
    def test_offline_tokens_leave_a_restored_request_the_rest_of_its_ttft(
        self, age_ms: int, answered: bool, limit_ms: float
    ) -> None:
        back = PROMPT._replace(restorable=99, age_ms=age_ms, answered=answered)
        plan = plan_of(waiting_online=[back], waiting_offline=[FRESH], slo=Slo(ttft_ms=1000))
        assert plan.limit_ms == pytest.approx(limit_ms)

    def test_a_request_that_has_just_arrived_has_all_of_its_ttft(self) -> None:
        """Eight chunks of 25 ms are just in time."""
        slo = Slo(ttft_ms=200, tbt_ms=25)
        assert plan_of(online=decodes(1), waiting_online=[PROMPT], slo=slo).tokens["prompt"] == 14

    @pytest.mark.parametrize("back", [0, 99])
    def test_no_offline_request_starts_while_an_online_one_lacks_memory(self, back: int) -> None:
        prompt = PROMPT._replace(restorable=back)
        assert not plan_of(waiting_online=[prompt], waiting_offline=[SMALL], free_blocks=6).tokens

    def test_no_offline_request_starts_while_an_online_one_is_deferred(self) -> None:
        """The second prompt would take 12 ms of the first one's, and an iteration of its own 11 ms."""
        first, second = Candidate("first", 50, 0), Candidate("second", 12, 0)
        slo = Slo(ttft_ms=1000)
        plan = plan_of(waiting_online=[first, second], waiting_offline=[SMALL], slo=slo)
        assert plan.tokens == {"first": 50}
        shorter = second._replace(tokens=11)
        plan = plan_of(waiting_online=[first, shorter], waiting_offline=[SMALL], slo=slo)
        assert plan.tokens == {"first": 50, "second": 11, "small": 16}

    @pytest.mark.parametrize(("tbt_ms", "shared"), [(79, True), (78, False)])
    def test_prompts_share_an_iteration_for_decode_steps_that_may_wait_so_long(
        self, tbt_ms: float, shared: bool
    ) -> None:
        """One more iteration takes 10 ms and 5 for steps, the second prompt 14; both prompts end after 79 ms."""
        first, second = Candidate("first", 50, 0), Candidate("second", 14, 0)
        slo = Slo(ttft_ms=1000, tbt_ms=tbt_ms)
        plan = plan_of(online=decodes(5), waiting_online=[first, second], slo=slo)
        assert {name: tokens for name, tokens in plan.tokens.items() if tokens > 1} == (
            {"first": 50, "second": 14} if shared else {"first": 50}
        )

    def test_no_request_is_served_after_an_online_prompt_that_is_cut(self) -> None:
        """A decode step and one token of the prompt take 41 of 55 ms; the others would fit into the rest."""
        slo = Slo(ttft_ms=1e6, tbt_ms=55)
        short = CHEAP._replace(tokens=10)
        plan = plan_of(online=decodes(1), waiting_online=[DEAR, short], waiting_offline=[SMALL], slo=slo)
        assert plan.tokens == {"decode0": 1, "dear": 1}


class TestGrowth:
    """Offline rows whose decode steps need KV blocks while none are free."""

    def test_no_row_is_evicted_for_an_offline_prompt(self) -> None:
        prompt = Candidate("prompt", 100, 0, False, 1)
        plan = plan_of(offline=[*decodes(1), prompt], free_blocks=0)
        assert (plan.tokens, plan.evicted) == ({"decode0": 1}, [])

    def test_the_last_saved_row_makes_room_or_the_last_row_where_none_is_saved(self) -> None:
        rows = growing(4, blocks=4)
        saved = [row._replace(saved=True) for row in rows[:3]]
        assert plan_of(offline=[*saved, rows[3]], free_blocks=0).evicted == ["row2"]
        assert plan_of(offline=rows, free_blocks=0).evicted == ["row3"]

    def test_an_evicted_row_needs_no_block_itself(self) -> None:
        """Three rows want a block each; the two blocks of one row are enough for the others."""
        plan = plan_of(offline=growing(3, blocks=2), free_blocks=0)
        assert (plan.tokens, plan.evicted) == ({"row0": 1, "row1": 1}, ["row2"])

    def test_a_prompt_under_way_makes_room_for_decode_steps_before_it(self) -> None:
        prompt = Candidate("prompt", 100, 0, False, 1)
        plan = plan_of(offline=[*growing(2, blocks=1), prompt], free_blocks=1)
        assert (plan.tokens, plan.evicted) == ({"row0": 1, "row1": 1}, ["prompt"])


class TestOfflineShare:
    """Phase 2: waiting rows are taken in order, as far as they fit."""

    def test_a_row_is_restored_even_if_running_rows_have_no_time(self) -> None:
        plan = Paced().plan(view_of(slo=Slo(tbt_ms=12), offline=decodes(3), waiting_offline=[ROW]))
        assert (list(plan.tokens), plan.restored) == (["decode0", "decode1"], ["row"])

    def test_no_row_overtakes_one_that_lacks_memory(self) -> None:
        assert not plan_of(waiting_offline=[FRESH, SMALL], free_blocks=6).tokens
        assert list(plan_of(waiting_offline=[FRESH, SMALL], free_blocks=8).tokens) == ["fresh", "small"]

    @pytest.mark.parametrize("policy", [Conserve(), Paced()])
    @pytest.mark.parametrize(
        ("slots", "looked_at"),
        [({"free_slots": 0}, 1), ({"free_slots": 1}, 2), ({"free_slots": 5, "reserved_slots": 4}, 2)],
    )
    def test_a_single_row_is_read_beyond_the_free_slots(
        self, policy: Any, slots: dict[str, int], looked_at: int
    ) -> None:
        read = []

        def waiting() -> Iterator[Candidate]:
            for row in alike(10):
                read.append(row)
                yield row

        plan = policy.plan(view_of(waiting_offline=waiting(), **slots))
        assert len(plan.admitted) == looked_at - 1
        assert len(read) == looked_at

    def test_a_waiting_row_is_predicted_as_a_prompt(self) -> None:
        model = ConServeModel.of(1, 0, 0, 0, 0, 5, 0, 10)  # 5 ms for each prompt
        plan = plan_of(model=model, waiting_offline=[FRESH], offline=decodes(1))
        assert plan.predicted_ms == 10 + 100 + 5 + 1

    def test_only_the_first_row_of_an_idle_engine_may_take_reserved_blocks(self) -> None:
        plan = plan_of(waiting_offline=[FRESH, SMALL], reserved_blocks=999)
        assert plan.admitted == ["fresh"]


class TestImages:
    """A waiting row does not begin before its images find time, and others pass it."""

    seeing = FRESH._replace(name="seeing", images=(Image(20, 1000.0),))
    beside: ClassVar[dict[str, Any]] = {"online": decodes(1, "live"), "slo": Slo(tbt_ms=60.0)}

    @pytest.mark.parametrize("rows", [1, 2, MOST_DEFERRED - 1, MOST_DEFERRED, MOST_DEFERRED + 1])
    def test_so_many_are_passed(self, rows: int) -> None:
        """The look at waiting rows ends with the last of them; it goes on if the next one may begin."""
        waiting = [self.seeing._replace(name=f"seeing{n}") for n in range(rows)]
        admitted = plan_of(**self.beside, waiting_offline=[*waiting, SMALL]).admitted
        assert admitted == ([] if rows > MOST_DEFERRED else ["small"])

    def test_one_begins_where_its_images_find_time(self) -> None:
        row = self.seeing._replace(images=(Image(20, 10.0),))
        assert plan_of(**self.beside, waiting_offline=[row, SMALL]).tokens == {"live0": 1, "seeing": 39}

    def test_a_running_row_gets_on_to_its_image_and_so_do_rows_behind_it(self) -> None:
        rows = [self.seeing._replace(blocks=7), Candidate("other", 20, 0, blocks=2)]
        assert plan_of(**self.beside, offline=rows).tokens == {"live0": 1, "seeing": 20, "other": 20}

    def test_none_is_passed_where_no_token_finds_time(self) -> None:
        late = Candidate("late", 1, 0, restorable=1)
        full = {**self.beside, "slo": Slo(tbt_ms=11.0)}
        plan = plan_of(**full, waiting_offline=[self.seeing, late])
        assert (plan.tokens, plan.restored) == ({"live0": 1}, [])
        assert plan_of(**self.beside, waiting_offline=[self.seeing, late]).restored == ["late"]


class TestDecodeStepsFirst:
    """Rows' decode steps come before their prompts, and a step that finds no time ends the iteration."""

    by_context = ConServeModel.of(1, 0, 0, 0.25, 0, 0, 0, 10)  # a prompt's token 1.25 ms, a decode step 6.25

    @pytest.mark.parametrize(("steps", "tokens"), [(2, 3), (3, 0), (4, 0)])
    def test_no_prompt_overtakes_a_step_that_was_left_out(self, steps: int, tokens: int) -> None:
        prompt = Candidate("prompt", 50, 0, blocks=4)
        rows = [*decodes(steps, "row"), prompt]
        live = [Candidate("live", 1, 20, True, 2)]
        plan = plan_of(model=self.by_context, online=live, offline=rows, slo=Slo(tbt_ms=33.0))
        assert plan.tokens.get("prompt", 0) == tokens
        assert len(plan.tokens.keys() - {"prompt"}) == 1 + 2

    def test_no_prompt_overtakes_one_whose_next_token_finds_no_time(self) -> None:
        dear = DEAR._replace(blocks=2)
        rows = [dear, Candidate("cheap", 20, 0, blocks=2)]
        assert plan_of(online=decodes(1), offline=rows, slo=Slo(tbt_ms=20.0)).tokens == {"decode0": 1}

    def test_rows_are_evicted_for_the_blocks_of_steps_that_find_time(self) -> None:
        """The first row needs a block. So do the last two, for whose steps there is no time."""
        grows = Candidate("grows", 1, 16, True, 1)
        rows = [grows, *decodes(1, "row"), grows._replace(name="third"), grows._replace(name="fourth")]
        live = [Candidate("live", 1, 20, True, 2)]
        plan = plan_of(online=live, offline=rows, free_blocks=0, slo=Slo(tbt_ms=13.0))
        assert plan.evicted == ["fourth"]
        assert plan.tokens == {"live": 1, "grows": 1, "row0": 1}


@pytest.mark.parametrize(("free", "tokens"), [(0, 2), (1, 3)])
def test_a_prompt_that_runs_alone_fills_the_blocks_that_it_has(free: int, tokens: int) -> None:
    row = Candidate("row", 3, 34, blocks=9)  # of four tokens: two have room
    assert plan_of(offline=[row], free_blocks=free, block_tokens=4, max_tokens=3).tokens == {"row": tokens}
    whole = Candidate("row", 3, 36, blocks=9)
    assert plan_of(offline=[whole], free_blocks=0, block_tokens=4).tokens == {"row": 1}, (
        "the engine finds it room"
    )


class TestDeferred:
    """Rows deferred for a prefix that the iteration computes are admitted last."""

    def test_rows_behind_the_most_that_are_deferred_follow_them(self) -> None:
        rows = alike(1 + MOST_DEFERRED)
        plan = plan_of(waiting_offline=[*rows, ROW, SMALL], max_tokens=10_000)
        assert plan.admitted == [*(row.name for row in rows), "small"]
        assert plan.restored == ["row"]

    def test_no_row_behind_them_overtakes_one_that_cannot_be_restored(self) -> None:
        """33 rows leave 19 blocks, of which 16 stay free: `ROW` needs 7 and `SMALL` needs 1."""
        rows = alike(1 + MOST_DEFERRED)
        plan = plan_of(waiting_offline=[*rows, ROW, SMALL], max_tokens=10_000, free_blocks=33 * 7 + 19)
        assert (plan.admitted, plan.restored) == ([row.name for row in rows], [])
        plan = plan_of(waiting_offline=[*rows, SMALL], max_tokens=10_000, free_blocks=33 * 7 + 19)
        assert plan.admitted[-1] == "small"

    def test_deferred_rows_are_admitted_as_long_as_slots_are_free_beside_the_reserved_ones(self) -> None:
        assert plan_of(waiting_offline=alike(3), free_slots=2).admitted == ["alike0", "alike1"]
        assert plan_of(waiting_offline=alike(3), free_slots=4, reserved_slots=2).admitted == [
            "alike0",
            "alike1",
        ]

    def test_deferred_rows_are_admitted_as_long_as_tokens_and_blocks_are_left(self) -> None:
        assert plan_of(waiting_offline=alike(3), max_tokens=200).tokens == {"alike0": 100, "alike1": 100}
        assert plan_of(waiting_offline=alike(3), free_blocks=14).tokens == {"alike0": 100, "alike1": 100}
        assert plan_of(waiting_offline=alike(3), free_blocks=13).tokens == {"alike0": 100}

    def test_no_row_overtakes_a_deferred_one_that_is_cut(self) -> None:
        """The first row takes 110 of 150 ms, and a token of the dear row 30 ms."""
        first, *_ = alike(1)
        rows = [first, *(row._replace(prefix=first.prefix) for row in (DEAR, CHEAP))]
        plan = Paced().plan(view_of(slo=Slo(tbt_ms=150), waiting_offline=rows))
        assert plan.tokens == {"alike0": 100, "dear": 1}


class TestLimits:
    """Longest iteration for the sake of arrivals: cases that the tables of test_policy leave out."""

    def test_frequent_arrivals_do_not_shorten_an_iteration_that_no_row_can_leave(self) -> None:
        often = view_of(slo=Slo(ttft_ms=1000), arrivals_per_s=20)
        assert arrival_limit_ms(often) == pytest.approx(110)

    def test_a_typical_prompt_is_predicted_without_context(self) -> None:
        """The model says 20 ms a request and 1 ms a token of prompt or context."""
        model = ConServeModel.of(0, 0, 0, 1, 20, 0, 0, 10)
        view = {"model": model, "slo": Slo(ttft_ms=100), "online": decodes(1)}
        assert bearable_ms(view_of(**view, prompt_tokens=30), 10) == 100 - 60
        assert bearable_ms(view_of(**view), 10) == 100 - 10


@pytest.mark.parametrize(
    ("name", "unusual"),
    [
        ("conserve", {"repeats", "pauses_rows", "rows_may_leave", "guards_prefixes"}),
        ("online-only", {"defers_offline", "repeats"}),
        ("non-preemptive", {"decides", "spares_offline", "knows_slo"}),
        ("priority", {"decides", "knows_slo"}),
        ("paced", {"treats_alike"}),
        ("sarathi++", {"predicts_as_hygen"}),
        ("hygen-star", {"predicts_as_hygen"}),
        ("hygen", {"predicts_as_hygen"}),
    ],
)
def test_policies_go_by_name_and_have_their_traits(name: str, unusual: set[str]) -> None:
    changed = {trait: not usual for trait, usual in Traits()._asdict().items() if trait in unusual}
    assert traits(name) == Traits(**changed)
    assert len(changed) == len(unusual)
    assert (name in BENCHED) == (name != "paced")
    assert set(BENCHED) - set(SERVING) == {"sarathi++", "hygen-star", "hygen"}
    assert len(POLICIES) == 8
    assert isinstance(POLICIES[CONSERVE](), Conserve)


def test_harvesters_and_servers_of_all_versions_agree_on_the_priority_of_offline_requests() -> None:
    assert OFFLINE_PRIORITY == 1000
