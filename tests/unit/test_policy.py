"""Promises of the policies, as tables: a view with one thing changed, and the plan for it."""

from collections.abc import Iterable
from dataclasses import replace
from math import inf, sqrt
from typing import Any

import pytest

from conserve.engine.policy.composer import Composer
from conserve.engine.policy.conserve import (
    Conserve,
    arrival_limit_ms,
    bearable_ms,
    cheapest_ms,
    harmless_wait_ms,
)
from conserve.engine.policy.offline import MOST_DEFERRED
from conserve.engine.policy.online_only import OnlineOnly
from conserve.engine.policy.paced import Paced
from conserve.engine.policy.victims import revocable_blocks
from conserve.engine.policy.view import DEFAULT_CLASS, Candidate, Image, Slo, View
from conserve.profiles.conserve import ConServeModel
from tests.policy_views import FRESH, ROW, add_steps, decodes, fitting, plan_of, view_of


class TestArrivalLimit:
    """Longest iteration with offline tokens that arrivals can wait for."""

    slo = Slo(ttft_ms=1000)

    def test_without_a_promise_there_is_none(self) -> None:
        assert arrival_limit_ms(view_of()) == inf

    def test_an_iteration_that_rows_can_leave_may_waste_2_percent_on_its_constant_part(self) -> None:
        view = view_of(slo=self.slo, rows_leave=True, rows_join=True, prompt_tokens=500, layers=32)
        assert arrival_limit_ms(view) == pytest.approx(10 / 0.02, rel=0.1)

    @pytest.mark.parametrize(
        ("prompt_tokens", "layers", "limit_ms"),
        [
            (900, 8, 8 * 90 / 2),  # 910 ms: a layer takes half of what the promise leaves
            (900, 32, 550),  # constant part 2 %
            (900, 1, 110),  # constant part 10 %
            (2000, 8, 110),
        ],
    )
    def test_an_arrival_waits_for_a_layer_for_half_of_its_slack_at_most(
        self, prompt_tokens: int, layers: int, limit_ms: float
    ) -> None:
        joins: dict[str, Any] = {"slo": self.slo, "rows_leave": True, "rows_join": True}
        view = view_of(**joins, prompt_tokens=prompt_tokens, layers=layers)
        assert arrival_limit_ms(view) == pytest.approx(limit_ms)

    @pytest.mark.parametrize(
        ("prompt_tokens", "limit_ms"),
        [
            (500, 110),  # ten times the smallest iteration: one token and the constant part
            (880, 110),  # 890 ms: what is left of the promise is as long
            (900, 90),
            (990, 0),
            (2000, 0),
        ],
    )
    def test_one_that_an_arrival_waits_out_leaves_time_for_a_typical_prompt(
        self, prompt_tokens: int, limit_ms: float
    ) -> None:
        view = view_of(slo=self.slo, prompt_tokens=prompt_tokens)
        assert arrival_limit_ms(view) == pytest.approx(limit_ms)

    def test_online_requests_are_a_sign_of_others_to_come(self) -> None:
        tight = Slo(ttft_ms=50)
        assert bearable_ms(view_of(slo=tight), 10) == 100
        assert bearable_ms(view_of(slo=tight, online=decodes(1)), 10) == 40
        assert bearable_ms(view_of(slo=tight, prompt_tokens=10), 10) == 30

    def test_one_that_begins_anew_is_as_long_as_costs_the_least(self) -> None:
        view = view_of(slo=self.slo, rows_leave=True, arrivals_per_s=20)
        assert cheapest_ms(view, 10) == sqrt(2 * 10 * 50)
        assert arrival_limit_ms(view) == cheapest_ms(view, 11)
        seldom = view_of(slo=self.slo, rows_leave=True, arrivals_per_s=1)
        assert arrival_limit_ms(seldom) == pytest.approx(110), "an arrival may still have to wait it out"

    def test_without_arrivals_one_a_minute_is_expected(self) -> None:
        assert cheapest_ms(view_of(), 10) == pytest.approx(sqrt(2 * 10 * 60_000))
        assert cheapest_ms(view_of(arrivals_per_s=1 / 120), 10) == pytest.approx(sqrt(2 * 10 * 60_000))


class TestBatchingMode:
    """No online request is in the engine, and none has arrived for a minute."""

    slo = Slo(ttft_ms=1000, tbt_ms=50)

    def test_an_iteration_is_as_large_as_the_engine_takes_where_rows_join_again(self) -> None:
        rows = [Candidate(f"row{n}", 400, 0) for n in range(8)]
        joins: dict[str, Any] = {
            "slo": self.slo,
            "rows_leave": True,
            "rows_join": True,
            "waiting_offline": rows,
        }
        assert plan_of(**joins, rare_starts=True).total == 2048
        assert plan_of(**joins, arrivals_per_s=0.1, prompt_tokens=100).predicted_ms <= 550

    def test_one_that_begins_anew_is_as_long_as_costs_the_least(self) -> None:
        view = view_of(slo=self.slo, rows_leave=True)
        assert arrival_limit_ms(view) == cheapest_ms(view, 11)

    def test_where_such_requests_are_not_rare_a_layer_takes_a_fiftieth_of_the_promise(self) -> None:
        joins: dict[str, Any] = {"rows_leave": True, "rows_join": True, "layers": 16}
        assert arrival_limit_ms(view_of(slo=Slo(ttft_ms=1000), **joins)) == pytest.approx(320)
        assert arrival_limit_ms(view_of(slo=Slo(ttft_ms=100), **joins)) == pytest.approx(110)

    def test_one_that_rows_cannot_leave_takes_half_of_the_promise(self) -> None:
        assert arrival_limit_ms(view_of(slo=self.slo)) == 500
        assert arrival_limit_ms(view_of(slo=Slo(ttft_ms=100))) == pytest.approx(110)

    def test_under_a_harm_it_is_longer_while_such_requests_are_rare(self) -> None:
        def limit_ms(**changes: Any) -> float:
            return harmless_wait_ms(view_of(slo=Slo(harm=0.1), **changes))

        assert limit_ms() == pytest.approx(110)
        assert limit_ms(rows_leave=True) == limit_ms(rows_leave=True, rows_join=True) == limit_ms()
        assert limit_ms(rare_starts=True) == pytest.approx(1100)
        assert limit_ms(rare_starts=True, prompt_tokens=100) < 110, "live requests are about"

    @pytest.mark.parametrize(
        "sign",
        [
            {"online": decodes(1)}, {"queued_online": 1}, {"waiting_online": [FRESH]}, {"prompt_tokens": 100},
            {"arrivals_per_s": 1 / 60},
        ],
    )  # fmt: skip
    def test_any_sign_of_an_online_request_ends_it(self, sign: dict[str, Any]) -> None:
        assert view_of(slo=self.slo).quiet
        assert not view_of(slo=self.slo, batches=False).quiet
        assert arrival_limit_ms(view_of(slo=self.slo, **sign)) < 500


class TestFirstTokens:
    """An iteration that brings a first token ends soon after it could."""

    def limit_ms(self, **changes: Any) -> float | None:
        return plan_of(slo=Slo(ttft_ms=1000), waiting_offline=[FRESH], **changes).limit_ms

    def test_offline_tokens_beside_it_add_a_fiftieth_of_the_promise_where_rows_can_leave(self) -> None:
        prompt = Candidate("prompt", 100, 0)  # 110 ms
        can_leave: dict[str, Any] = {"rows_leave": True, "rows_join": True, "layers": 32}
        assert self.limit_ms(waiting_online=[prompt], **can_leave) == 110 + 20
        assert self.limit_ms(waiting_online=[prompt._replace(age_ms=880)], **can_leave) == 120
        assert self.limit_ms(waiting_online=[prompt._replace(answered=True)], **can_leave) == pytest.approx(
            550
        )
        assert self.limit_ms(online=decodes(1), **can_leave) == pytest.approx(550)

    def test_they_have_the_promise_and_the_arrival_limit_where_rows_cannot(self) -> None:
        short = Candidate("prompt", 20, 0)
        assert self.limit_ms(waiting_online=[short]) == pytest.approx(110)
        assert self.limit_ms(waiting_online=[short._replace(age_ms=950)]) == 50


class TestComingBack:
    """An evicted row whose KV host memory has."""

    @pytest.mark.parametrize(
        ("changes", "comes"),
        [
            ({}, True),
            ({"free_slots": 1}, True),
            ({"free_slots": 0}, False),
            ({"free_slots": 3, "reserved_slots": 2}, True),
            ({"free_slots": 2, "reserved_slots": 2}, False),
            ({"free_blocks": 7}, True),
            ({"free_blocks": 6}, False),
            ({"free_blocks": 9, "watermark_blocks": 2}, True),
            ({"free_blocks": 8, "watermark_blocks": 2}, False),
            ({"free_blocks": 9, "unwritten_blocks": 2}, True),
            ({"free_blocks": 8, "unwritten_blocks": 2}, False),
            ({"free_blocks": 7, "reserved_blocks": 5}, True),  # one row may always run
            ({"free_blocks": 12, "reserved_blocks": 5, "offline": decodes(1)}, True),
            ({"free_blocks": 11, "reserved_blocks": 5, "offline": decodes(1)}, False),
            ({"free_blocks": 9, "offline": decodes(5)}, True),  # a block for every second that runs
            ({"free_blocks": 8, "offline": decodes(5)}, False),
            ({"max_tokens": 2, "online": decodes(1)}, True),
            ({"max_tokens": 1, "online": decodes(1)}, False),
        ],
    )
    def test_begins_as_soon_as_there_is_room_for_all_of_it(
        self, changes: dict[str, Any], comes: bool
    ) -> None:
        assert list(plan_of(waiting_offline=[ROW], **changes).restored) == (["row"] if comes else [])

    @pytest.mark.parametrize(("free_blocks", "evicted"), [(12, []), (11, ["saved"])])
    def test_of_a_live_request_leaves_the_blocks_that_running_prompts_will_need(
        self, free_blocks: int, evicted: list[str]
    ) -> None:
        """Otherwise vLLM would refuse it."""
        queues = {"waiting_online": [ROW._replace(answered=True)], "unwritten_blocks": 5}
        saved = Candidate("saved", 1, 20, True, 4, saved=True)
        plan = plan_of(**queues, offline=[saved], free_blocks=free_blocks)
        assert (plan.restored, plan.evicted) == (["row"], evicted)
        assert not plan_of(**queues, free_blocks=11).restored

    def test_takes_what_it_needs_and_no_time(self) -> None:
        plan = plan_of(waiting_offline=[ROW, FRESH], free_blocks=14, max_tokens=101, slo=Slo(tbt_ms=1.0))
        assert plan.restored == ["row"]
        plan = plan_of(waiting_offline=[ROW, FRESH], free_blocks=14, max_tokens=101)
        assert (plan.restored, plan.tokens) == (["row"], {"fresh": 100})
        assert not plan_of(waiting_offline=[ROW, FRESH], free_blocks=13).tokens
        assert not plan_of(waiting_offline=[ROW, FRESH], free_slots=1).tokens

    def test_keeps_one_token_of_the_iteration_free_however_many_come_back(self) -> None:
        rows = [ROW, ROW._replace(name="other")]
        plan = plan_of(waiting_offline=[*rows, FRESH], max_tokens=100)
        assert (plan.restored, plan.tokens) == (["row", "other"], {"fresh": 99})

    def test_a_second_one_leaves_what_is_reserved(self) -> None:
        rows = [ROW, ROW._replace(name="other")]
        for free_blocks, restored in ((18, ["row"]), (19, ["row", "other"])):
            plan = plan_of(waiting_offline=rows, free_blocks=free_blocks, reserved_blocks=5)
            assert plan.restored == restored

    def test_no_request_overtakes_it(self) -> None:
        small = Candidate("small", 16, 0)
        assert not plan_of(waiting_offline=[ROW, small], free_blocks=6).admitted
        assert plan_of(waiting_offline=[FRESH, ROW, small], free_blocks=13).admitted == ["fresh"]
        plan = plan_of(waiting_offline=[FRESH, ROW, small], free_blocks=15)
        assert (plan.admitted, plan.restored) == (["fresh", "small"], ["row"])

    def test_waits_while_others_are_evicted(self) -> None:
        """The second of two rows that both need a block gives up its own, which are room enough."""
        full = [Candidate(f"full{n}", 1, 64, True, 4) for n in range(2)]
        small = Candidate("small", 16, 0, restorable=15)
        plan = plan_of(offline=full, waiting_offline=[small], free_blocks=0)
        assert (plan.evicted, plan.restored) == (["full1"], [])

    def test_is_not_brought_twice_where_another_brings_its_beginning(self) -> None:
        row = ROW._replace(prefix=[f"p{n}" for n in range(6)])
        other = row._replace(name="other")
        plan = plan_of(waiting_offline=[row, other, FRESH])
        assert (plan.restored, plan.admitted) == (["row"], ["fresh"])
        plan = plan_of(waiting_offline=[row], coming=frozenset(["p0"]))
        assert (plan.restored, plan.tokens) == ([], {}), "nor is it computed meanwhile"
        further = row._replace(context=32, tokens=68)  # it has the first two blocks
        assert plan_of(waiting_offline=[further], coming=frozenset(["p0", "p1"])).restored
        assert not plan_of(waiting_offline=[further], coming=frozenset(["p2"])).restored

    def test_a_row_that_gave_its_kv_away_again_just_now_does_not_start(self) -> None:
        held = Candidate("held", 1, 320, blocks=20)
        plan = plan_of(
            waiting_online=[ROW], waiting_offline=[held], waiting_with_blocks=[held], free_blocks=6
        )
        assert (plan.restored, plan.evicted, plan.tokens) == (["row"], ["held"], {})

    def test_paced_engines_bring_rows_back_too(self) -> None:
        plan = Paced().plan(view_of(waiting_offline=[ROW]))
        assert plan.restored == ["row"]


class TestCutShort:
    """Offline requests are served in order: the first that does not fit whole ends the iteration."""

    dear = Candidate("dear", 10, 0, False, 1, surcharge_ms=29.0)  # 30 ms a token
    cheap = Candidate("cheap", 10, 0, False, 1)

    @pytest.mark.parametrize("lane", ["offline", "waiting_offline"])
    def test_none_that_would_fit_goes_past_it(self, lane: str) -> None:
        view = view_of(slo=Slo(tbt_ms=120.0), **{lane: [self.dear, self.cheap]})
        assert Paced().plan(view).tokens == {"dear": 3}

    def test_none_that_waits_goes_past_one_that_runs(self) -> None:
        view = view_of(slo=Slo(tbt_ms=120.0), offline=[self.dear], waiting_offline=[self.cheap])
        assert Paced().plan(view).tokens == {"dear": 3}
        view = view_of(slo=Slo(tbt_ms=12.0), offline=decodes(3), waiting_offline=[self.cheap])
        assert Paced().plan(view).tokens == {"decode0": 1, "decode1": 1}


class TestMakingRoom:
    """Online requests take slots and KV blocks from offline ones, no more than they need."""

    prompt = Candidate("prompt", 100, 0)  # 7 blocks
    rows = tuple(Candidate(f"row{n}", 1, 60, True, 4) for n in range(3))

    def evicted(self, **changes: Any) -> list[str]:
        evicted, parked = self.gone(**changes)
        assert not parked
        return evicted

    def gone(self, **changes: Any) -> tuple[list[str], list[str]]:
        """Rows that are evicted, and rows that are parked."""
        plan = plan_of(**{"waiting_online": [self.prompt], "parks": True, **changes})
        assert plan.admitted[:1] == ["prompt"]
        return list(plan.evicted), list(plan.parked)

    @pytest.mark.parametrize(
        ("free_blocks", "lost"),
        [(7, []), (6, ["row2"]), (3, ["row2"]), (2, ["row2", "row1"]), (0, ["row2", "row1"])],
    )
    def test_the_last_rows_go_first_until_there_is_room(self, free_blocks: int, lost: list[str]) -> None:
        assert self.evicted(offline=self.rows, free_blocks=free_blocks) == lost

    def test_rows_that_lose_nothing_go_before_others(self) -> None:
        rows = [self.rows[0]._replace(saved=True), *self.rows[1:]]
        assert self.evicted(offline=rows, free_blocks=6) == ["row0"]
        assert self.evicted(offline=rows, free_blocks=2) == ["row0", "row2"]

    def test_blocks_of_rows_that_wait_are_taken_before(self) -> None:
        held = [Candidate(f"held{n}", 1, 40, blocks=3, saved=True) for n in range(2)]
        for free_blocks, lost in (
            (7, []),
            (6, ["held1"]),
            (4, ["held1"]),
            (3, ["held1", "held0"]),
            (0, ["held1", "held0", "row2"]),
        ):
            assert self.evicted(offline=self.rows, waiting_with_blocks=held, free_blocks=free_blocks) == lost

    def test_a_slot_costs_one_row_its_place_and_not_its_memory(self) -> None:
        assert self.gone(offline=self.rows, free_slots=1) == ([], [])
        assert self.gone(offline=self.rows, free_slots=0) == ([], ["row2"])
        assert self.gone(offline=self.rows, free_slots=-1) == ([], ["row2", "row1"])
        held = [Candidate("held", 1, 40, blocks=3, saved=True)]
        assert self.gone(offline=self.rows, waiting_with_blocks=held, free_slots=0) == ([], ["row2"]), (
            "it has no slot to give"
        )
        assert self.gone(offline=self.rows, free_slots=-1, parks=False) == (["row2", "row1"], [])

    def test_a_parked_row_computes_nothing_in_the_iteration(self) -> None:
        plan = plan_of(waiting_online=[self.prompt], offline=self.rows, free_slots=0, parks=True)
        assert plan.parked == ["row2"]
        assert plan.tokens.keys() == {"prompt", "row0", "row1"}
        assert plan.changes_something

    @pytest.mark.parametrize(
        ("free", "others", "gone"), [(0, 3, ["row1"]), (0, 2, []), (2, 1, ["row1"]), (3, 9, [])]
    )
    def test_a_parked_row_takes_exactly_what_it_lacks(self, free: int, others: int, gone: list[str]) -> None:
        """Three blocks."""
        parked = [Candidate("row0", 48, 64, blocks=4), Candidate("row1", 48, 64, blocks=others)]
        plan = plan_of(waiting_offline=parked, waiting_with_blocks=parked, free_blocks=free)
        assert (plan.evicted, plan.admitted[:1]) == (gone, ["row0"] if gone or free == 3 else [])

    def test_the_last_row_that_has_computed_something_is_parked(self) -> None:
        rows = [*self.rows, Candidate("fresh", 480, 0, blocks=30)]
        assert self.gone(offline=rows, free_slots=0) == ([], ["row2"])
        assert self.gone(offline=rows, free_slots=-3) == ([], ["row2", "row1", "row0", "fresh"])

    def test_a_row_that_is_evicted_for_its_memory_gives_its_slot_too(self) -> None:
        assert self.gone(offline=self.rows, free_slots=0, free_blocks=6) == (["row2"], [])
        assert self.gone(offline=self.rows, free_slots=-1, free_blocks=6) == (["row2"], ["row1"])

    def test_the_memory_of_rows_that_are_parked_is_the_next_to_be_taken(self) -> None:
        """The second prompt wants the blocks that the first one, which lacked a slot alone, had left."""
        held = [Candidate("held", 1, 40, blocks=3, saved=True)]
        both = [self.prompt, self.prompt._replace(name="second")]
        for blocks, evicted, parked in (
            (14, [], ["row2", "row1"]),
            (12, ["held"], ["row2", "row1"]),
            (10, ["held", "row2"], ["row1"]),
        ):
            plan = plan_of(
                waiting_online=both,
                offline=self.rows,
                waiting_with_blocks=held,
                parks=True,
                free_slots=0,
                free_blocks=blocks,
            )
            assert plan.admitted == ["prompt", "second"]
            assert (plan.evicted, plan.parked) == (evicted, parked)

    def test_a_parked_row_takes_the_memory_of_those_behind_it_where_none_runs(self) -> None:
        """Each is in the middle of its prompt, and wants three blocks that the others have."""
        parked = [Candidate(f"row{n}", 48, 64, blocks=4) for n in range(3)]
        held = [row._replace(tokens=1) for row in parked]
        plan = plan_of(waiting_offline=parked, waiting_with_blocks=held, free_blocks=0)
        assert (plan.evicted, plan.admitted) == (["row2"], ["row0"])
        for room in (
            {"offline": [self.rows[0]], "free_blocks": 2},  # one runs
            {"free_slots": 0},
            {"free_slots": 2, "reserved_slots": 2},
            {"waiting_offline": [parked[0]._replace(tokens=200), *parked[1:]]},  # it wants more than all have
            # It wants more than the other has, with the blocks that stay free.
            {"waiting_offline": parked[:2], "waiting_with_blocks": held[:2], "watermark_blocks": 2},
        ):
            plan = plan_of(
                **{"waiting_offline": parked, "waiting_with_blocks": held, "free_blocks": 0, **room}
            )
            assert (plan.evicted, plan.admitted) == ([], [])
        live = [Candidate(f"live{n}", 1, 60, True, 5) for n in range(4)]
        plan = plan_of(
            waiting_offline=parked, waiting_with_blocks=held, online=live, free_blocks=0, slo=Slo(tbt_ms=4.0)
        )
        assert (plan.evicted, plan.admitted) == ([], []), "live requests leave it no time"

    def test_a_row_before_an_image_that_finds_no_time_gives_its_memory_to_one_behind(self) -> None:
        seeing = Candidate("seeing", 100, 0, blocks=2, images=(Image(0, 40.0),))
        other = Candidate("other", 20, 16, blocks=1)
        live = [Candidate("live", 1, 60, True, 4)]
        plan = plan_of(online=live, offline=[seeing, other], free_blocks=1, slo=Slo(tbt_ms=40.0))
        assert (plan.tokens, plan.evicted) == ({"live": 1, "other": 20}, ["seeing"])

    def test_the_watermark_stays_free_where_that_can_be_had(self) -> None:
        assert self.evicted(offline=self.rows, free_blocks=9, watermark_blocks=2) == []
        assert self.evicted(offline=self.rows, free_blocks=8, watermark_blocks=2) == ["row2"]
        assert self.evicted(free_blocks=8, watermark_blocks=2) == []
        assert self.evicted(free_blocks=7, watermark_blocks=2) == []

    @pytest.mark.parametrize(
        "short",
        [
            {"free_blocks": 6},
            {"free_slots": 0},
            {"free_blocks": 2, "offline": rows[:1]},
            {"free_slots": -1, "offline": rows[:1]},
        ],
    )
    def test_none_is_evicted_where_that_is_not_enough(self, short: dict[str, Any]) -> None:
        plan = plan_of(waiting_online=[self.prompt], waiting_offline=[FRESH], **short)
        assert (plan.evicted, plan.tokens) == ([], {})

    def test_prompts_under_way_and_decode_steps_take_what_they_need(self) -> None:
        under_way = Candidate("prompt", 100, 32, False, 2)  # 9 blocks, less the two it has
        for request in (under_way, Candidate("decode", 1, 64, True, 4)._replace(name="prompt")):
            plan = plan_of(online=[request], offline=self.rows, free_blocks=0)
            assert plan.tokens["prompt"] == request.tokens
            assert plan.evicted == (["row2", "row1"] if request is under_way else ["row2"])

    def test_one_that_comes_back_takes_them_too(self) -> None:
        back = self.prompt._replace(restorable=99)
        plan = plan_of(waiting_online=[back], offline=self.rows, free_blocks=3)
        assert (plan.restored, plan.evicted) == (["prompt"], ["row2"])
        assert not plan_of(waiting_online=[back], waiting_offline=[FRESH], free_blocks=6).tokens
        assert not plan_of(waiting_online=[back], online=decodes(1), max_tokens=1).restored

    def test_what_is_left_is_given_to_offline_requests(self) -> None:
        plan = plan_of(waiting_online=[self.prompt], offline=self.rows, free_blocks=6)
        assert plan.tokens == {"prompt": 100, "row0": 1, "row1": 1}


class TestOnlinePrompts:
    """Prompts beside decode steps of others are cut to their TBT where the first token allows."""

    def tokens(self, prompt: Candidate, *, tbt_ms: float, ttft_ms: float = 1000.0, steps: int = 1) -> int:
        slo = Slo(tbt_ms=tbt_ms, ttft_ms=ttft_ms)
        return plan_of(online=decodes(steps), waiting_online=[prompt], slo=slo).tokens.get("prompt", 0)

    prompt = Candidate("prompt", 100, 0)

    @pytest.mark.parametrize(
        ("age_ms", "tokens"),
        [
            (
                0,
                14,
            ),  # 25 ms are 14 tokens beside the step and the constant part: seven chunks, and 13 ms for the rest
            (812, 14),
            (813, 100),
            (1000, 100),
        ],
    )
    def test_a_chunk_fills_the_tbt_while_all_of_them_are_early_enough(self, age_ms: int, tokens: int) -> None:
        assert self.tokens(self.prompt._replace(age_ms=age_ms), tbt_ms=25) == tokens

    @pytest.mark.parametrize(("queued", "tokens"), [(1, 14), (8, 14), (9, 100)])
    def test_prompts_that_queue_behind_have_to_be_early_enough_too(self, queued: int, tokens: int) -> None:
        """188 ms in chunks leave time for seven prompts of 110 ms, but not for eight."""
        slo = Slo(tbt_ms=25.0, ttft_ms=1000.0)
        plan = plan_of(online=decodes(1), waiting_online=[self.prompt], queued_online=queued, slo=slo)
        assert plan.tokens["prompt"] == tokens

    @pytest.mark.parametrize(
        "changes", [{"prompt_tokens": 10}, {"slos": {DEFAULT_CLASS: Slo(tbt_ms=25.0, ttft_ms=1000.0)}}]
    )
    def test_short_prompts_and_those_of_other_classes_do_not_hurry_a_long_one(
        self, changes: dict[str, Any]
    ) -> None:
        slo = Slo(tbt_ms=25.0, ttft_ms=1000.0)
        waiting = {"waiting_online": [self.prompt], "queued_online": 20}
        assert plan_of(online=decodes(1), slo=slo, **waiting, **changes).tokens["prompt"] == 14

    @pytest.mark.parametrize(("age_ms", "tokens"), [(0, 0), (879, 0), (880, 100)])
    def test_where_not_even_a_token_fits_it_waits_one_iteration_if_it_can(
        self, age_ms: int, tokens: int
    ) -> None:
        # An iteration of 11 ms, then 110 ms for the prompt.
        prompt = self.prompt._replace(age_ms=age_ms)
        assert self.tokens(prompt, tbt_ms=11) == tokens
        assert self.tokens(prompt, tbt_ms=11, ttft_ms=inf) == 100, "without a promise it would wait for ever"

    def test_what_a_token_costs_beyond_the_model_counts(self) -> None:
        dear = self.prompt._replace(surcharge_ms=1.0)  # 210 ms alone
        assert self.tokens(dear, tbt_ms=25) == 7
        assert self.tokens(dear._replace(age_ms=779), tbt_ms=11) == 0
        assert self.tokens(dear._replace(age_ms=780), tbt_ms=11) == 100

    def test_the_second_waits_if_it_would_hold_up_the_first_for_longer(self) -> None:
        """Apart, those that wait pay for one more iteration, 11 ms at least; together, the first for the second."""
        first, second = Candidate("first", 100, 0), Candidate("second", 11, 0)

        def served(second: Candidate, **changes: Any) -> int:
            slo = Slo(ttft_ms=1000)
            return len(plan_of(**{"waiting_online": [first, second], "slo": slo, **changes}).tokens)

        assert served(second) == 2
        assert served(second._replace(tokens=12)) == 1
        assert served(second._replace(tokens=22), queued_online=2) == 2
        assert served(second._replace(tokens=23), queued_online=2) == 1
        assert served(second._replace(tokens=30), online=decodes(20)) == 22, "whose steps run once more"
        assert served(second._replace(tokens=31), online=decodes(20)) == 21
        assert served(second._replace(tokens=23), slo=Slo()) == 2
        assert served(second._replace(tokens=6, surcharge_ms=1.0)) == 1
        third = Candidate("third", 6, 0)
        assert served(second, waiting_online=[first, second._replace(tokens=1), third]) == 2
        assert (
            served(second, waiting_online=[first, second._replace(tokens=1), third._replace(tokens=5)]) == 3
        )


class TestLeast:
    """An engine without online requests computes a few tokens even where there is time for none."""

    no_time = Slo(tbt_ms=1.0, ttft_ms=0.0)

    def computed(self, policy: Any, **changes: Any) -> dict[str, int]:
        return dict(policy.plan(view_of(slo=self.no_time, prompt_tokens=1, **changes)).tokens)

    @pytest.mark.parametrize(("policy", "tokens"), [(Conserve(), 16), (Paced(), 1)])
    def test_of_a_prompt_it_is_a_block_or_a_token(self, policy: Any, tokens: int) -> None:
        running = Candidate("row", 100, 0, False, 7)
        assert self.computed(policy, offline=[running]) == {"row": tokens}
        assert self.computed(policy, waiting_offline=[FRESH]) == {"fresh": tokens}
        assert self.computed(policy, offline=[running._replace(tokens=1)]) == {"row": 1}

    @pytest.mark.parametrize("policy", [Conserve(), Paced()])
    def test_a_decode_step_is_not_divided(self, policy: Any) -> None:
        speculative = Candidate("row", 40, 100, True, 7)
        assert self.computed(policy, offline=[speculative]) == {"row": 40}
        assert self.computed(policy, offline=[speculative], free_blocks=0) == {"row": 40}

    def test_without_a_block_it_is_what_the_last_one_has_room_for(self) -> None:
        row = Candidate("row", 100, 60, False, 4)
        assert self.computed(Conserve(), offline=[row], free_blocks=1) == {"row": 16}
        assert self.computed(Conserve(), offline=[row], free_blocks=0) == {"row": 4}
        full = row._replace(context=64)
        assert self.computed(Conserve(), offline=[full], free_blocks=0) == {"row": 1}

    def test_so_it_is_where_there_is_time_but_no_memory_for_all_of_a_prompt(self) -> None:
        row = Candidate("row", 100, 0, False, 1)
        for free_blocks, tokens in ((5, 16), (6, 100)):
            assert plan_of(offline=[row], free_blocks=free_blocks).tokens == {"row": tokens}

    def test_what_cannot_start_does_not(self) -> None:
        assert not self.computed(Conserve())
        assert not self.computed(Conserve(), waiting_offline=[FRESH], free_slots=0)
        assert not self.computed(Conserve(), waiting_offline=[FRESH], free_blocks=6)
        assert not self.computed(Conserve(), waiting_offline=[ROW], free_blocks=6)
        assert not self.computed(Conserve(), waiting_offline=[ROW, FRESH]), "the row comes back"
        assert not self.computed(Conserve(), waiting_offline=[FRESH], online=decodes(1)).get("fresh")

    def test_what_is_reserved_does_not_stop_the_only_row(self) -> None:
        assert self.computed(Conserve(), waiting_offline=[FRESH], reserved_blocks=999) == {"fresh": 16}

    def test_iterations_are_not_made_larger_than_they_may_be(self) -> None:
        assert self.computed(Conserve(), waiting_offline=[FRESH], max_tokens=5) == {"fresh": 5}
        assert self.computed(Conserve(), offline=[Candidate("row", 100, 0, False, 7)], max_tokens=5) == {
            "row": 5
        }
        assert self.computed(Conserve(), waiting_offline=[FRESH._replace(tokens=3)]) == {"fresh": 3}


def spacious(**changes: object) -> View:
    """A view with room for five requests of a hundred tokens."""
    room = {
        "model": ConServeModel.of(0.1, 0, 0, 0.001, 0.1, 0.1, 0, 10.0),
        "slo": Slo(),
        "max_tokens": 500,
        "free_slots": 50,
        "free_blocks": 1000,
        "block_tokens": 16,
    }
    return View(**{**room, **changes})  # type: ignore[arg-type]


def sharing(count: int, *, tokens: int = 100, behind: int = 0) -> list[Candidate]:
    """Waiting rows that all begin alike, and others behind them."""
    prefix = [f"p{n}" for n in range(tokens // 16)]
    alike = [Candidate(f"alike-{n}", tokens, 0, prefix=prefix) for n in range(count)]
    return [*alike, *(Candidate(f"other-{n}", 100, 0) for n in range(behind))]


def test_a_row_whose_prefix_is_being_computed_is_held_out_while_others_fill_the_iteration() -> None:
    for policy in (Conserve(), Paced()):
        plan = policy.plan(spacious(waiting_offline=sharing(3, behind=6)))
        assert plan.admitted == ["alike-0", "other-0", "other-1", "other-2", "other-3"]


def test_a_deferred_row_is_taken_where_no_other_fills_the_iteration() -> None:
    plan = Conserve().plan(spacious(waiting_offline=sharing(3, behind=1)))
    assert plan.admitted == ["alike-0", "other-0", "alike-1", "alike-2"]


def test_a_row_held_out_is_taken_where_the_next_has_no_memory() -> None:
    large = Candidate("large", 400, 0)
    view = spacious(waiting_offline=[*sharing(2), large], free_blocks=20)
    assert Conserve().plan(view).admitted == ["alike-0", "alike-1"]


class TestOvertaking:
    """A waiting row of 80 KV blocks, where 60 are free and live requests hold 40."""

    LIVE = (Candidate("live", 1, 640, True, 41),)
    LARGE, SMALL = Candidate("large", 1280, 0), Candidate("small", 16, 0)

    def admitted(self, *waiting: Candidate, **changes: Any) -> list[str]:
        given: dict[str, Any] = {"online": self.LIVE, "waiting_offline": waiting, "free_blocks": 60}
        return Conserve().plan(spacious(**{**given, **changes})).admitted

    def test_rows_begin_before_one_for_which_live_requests_leave_no_memory(self) -> None:
        assert self.admitted(self.LARGE, self.SMALL) == ["small"]
        assert self.admitted(self.LARGE._replace(restorable=1000), self.SMALL) == ["small"]
        assert self.admitted(self.SMALL, self.LARGE._replace(restorable=1000), FRESH) == ["small", "fresh"]

    def test_none_begins_before_one_that_would_have_it_once_rows_end(self) -> None:
        rows = [Candidate(f"row{n}", 1, 160, True, 11) for n in range(2)]
        assert self.admitted(self.LARGE, self.SMALL, offline=rows) == []
        assert self.admitted(self.LARGE, self.SMALL, offline=rows, watermark_blocks=3) == ["small"]
        assert self.admitted(self.LARGE, self.SMALL, waiting_with_blocks=rows) == []
        assert self.admitted(self.LARGE._replace(restorable=1000), self.SMALL, offline=rows) == []

    @pytest.mark.parametrize(("tokens", "admitted"), [(1600, ["small"]), (1632, [])])
    def test_one_that_has_no_room_in_the_engine_at_all_is_overtaken_by_none(
        self, tokens: int, admitted: list[str]
    ) -> None:
        assert self.admitted(self.LARGE._replace(tokens=tokens), self.SMALL) == admitted

    @pytest.mark.parametrize(
        ("minutes", "overtaken"),
        [(0.87, True), (0.88, False), (1.0, True), (1.74, True), (1.76, False), (40.0, True), (59.0, False)],
    )
    def test_none_does_in_the_last_quarter_of_each_doubling_of_its_wait(
        self, minutes: float, overtaken: bool
    ) -> None:
        waits = self.LARGE._replace(age_ms=60_000 * minutes)
        behind = Candidate("larger", 1290, 0, age_ms=53_000)
        assert self.admitted(waits, behind, self.SMALL) == ["small"] * overtaken, "the first one decides"

    @pytest.mark.parametrize(("passed", "admitted"), [(MOST_DEFERRED - 1, ["small"]), (MOST_DEFERRED, [])])
    def test_so_many_are_overtaken_at_most(self, passed: int, admitted: list[str]) -> None:
        large = [self.LARGE._replace(name=f"large{n}") for n in range(passed)]
        assert self.admitted(*large, self.SMALL) == admitted

    def test_a_push_overtakes_none(self) -> None:
        view = spacious(
            online=self.LIVE,
            waiting_offline=[self.LARGE, self.SMALL],
            free_blocks=60,
            slo=Slo(tbt_ms=11.0),
            pushed={"large", "small"},
            push_scale=2.0,
        )
        assert not Conserve().plan(view).admitted


def test_rows_are_held_out_for_prompts_under_way_and_for_online_ones_too() -> None:
    waiting = sharing(1, behind=5)
    computing = Candidate("computing", 100, 0, False, 7, prefix=waiting[0].prefix)
    for lane in ("online", "offline"):
        view = spacious(waiting_offline=waiting, **{lane: [computing]})
        assert "alike-0" not in Conserve().plan(view).tokens
    computed = computing._replace(tokens=1, context=100, decode=True)
    view = spacious(waiting_offline=waiting, offline=[computed])
    assert "alike-0" in Conserve().plan(view).tokens


def test_a_cached_prefix_defers_no_request() -> None:
    waiting = [row._replace(tokens=4, context=96, blocks=6) for row in sharing(3)]
    view = spacious(waiting_offline=waiting)
    assert Conserve().plan(view).admitted == ["alike-0", "alike-1", "alike-2"]


def test_no_more_rows_are_looked_at_than_can_be_held_out() -> None:
    read: list[int] = []

    def endless() -> Iterable[Candidate]:
        for n in range(10**9):
            read.append(n)
            yield Candidate(f"r{n}", 100, 0, prefix=["p"] * 6)

    Conserve().plan(spacious(waiting_offline=endless()))
    assert len(read) <= MOST_DEFERRED + 6


def test_waiting_requests_are_read_only_as_far_as_they_fit() -> None:
    def endless() -> Iterable[Candidate]:
        for n in range(10**9):
            read.append(n)
            yield Candidate(f"r{n}", 100, 0)

    for policy in (Conserve(), Paced()):
        read: list[int] = []
        policy.plan(spacious(waiting_offline=endless()))
        assert len(read) <= 6


def test_a_model_without_a_constant_does_not_shut_offline_requests_out() -> None:
    model = ConServeModel.of(0.1, 0, 0, 0, 0, 0, 0, 0)
    view = spacious(model=model, slo=Slo(ttft_ms=1000, tbt_ms=100), waiting_offline=[Candidate("r", 100, 0)])
    assert Conserve().plan(view).tokens


def test_no_row_is_evicted_for_decode_steps_that_there_is_no_time_for() -> None:
    """The TBT is too tight for offline tokens, and the KV cache is full."""
    offline = [Candidate(f"off-{n}", 1, 64, True, 4) for n in range(3)]
    online = [Candidate("on", 1, 20, True, 2)]
    view = spacious(online=online, offline=offline, slo=Slo(tbt_ms=1.0), free_blocks=0)
    assert not Conserve().plan(view).evicted


def test_the_last_running_request_is_not_evicted_for_its_own_growth() -> None:
    view = spacious(offline=[Candidate("r", 1, 64, True, 4)], free_blocks=0)
    assert not Conserve().plan(view).evicted


@pytest.mark.parametrize("count", [1, 2, 39, 40, 41, 200])
def test_as_many_decode_steps_run_as_there_is_time_for(count: int) -> None:
    """10 ms and 0.3 for each, so that 40 of them take the 22."""
    model = ConServeModel.of(0.2, 0, 0, 0, 0.1, 0, 0, 10.0)
    decodes = [Candidate(f"r{n}", 1, 20, True, 2) for n in range(count)]
    view = spacious(model=model, offline=decodes, slo=Slo(tbt_ms=22.0 * (1 + 1e-9)))
    tokens = Paced().plan(view).tokens
    assert list(tokens) == [request.name for request in decodes[:40]]


def test_offline_requests_are_not_admitted_into_the_watermark() -> None:
    waiting = [Candidate("r", 160, 0)]
    for free_blocks, admitted in ((11, []), (12, ["r"])):
        view = spacious(waiting_offline=waiting, free_blocks=free_blocks, watermark_blocks=2)
        assert Conserve().plan(view).admitted == admitted


def test_a_block_for_every_second_running_request_is_kept_free() -> None:
    running = [Candidate(f"r{n}", 1, 20, True, 2) for n in range(4)]
    for free_blocks, admitted in ((11, []), (12, ["new"])):
        view = spacious(offline=running, waiting_offline=[Candidate("new", 160, 0)], free_blocks=free_blocks)
        assert Conserve().plan(view).admitted == admitted


@pytest.mark.parametrize(
    ("age_ms", "tokens"),
    [
        (0.0, range(60, 100)),  # five chunks in 20 ms each are early enough
        (950.0, range(400, 401)),  # they are not, and the prompt is computed at full speed
    ],
)
def test_an_online_prompt_is_cut_to_the_tbt_of_others_while_that_is_early_enough(
    age_ms: float, tokens: range
) -> None:
    view = spacious(
        online=[Candidate("decode", 1, 20, True, 2)],
        waiting_online=[Candidate("prompt", 400, 0, age_ms=age_ms)],
        waiting_offline=[Candidate("offline", 400, 0)],
        slo=Slo(ttft_ms=1000.0, tbt_ms=20.0),
    )
    plan = Conserve().plan(view)
    assert plan.tokens["prompt"] in tokens
    assert "offline" not in plan.tokens


@pytest.mark.parametrize(("age_ms", "waits"), [(0.0, True), (960.0, False)])
def test_an_online_prompt_waits_an_iteration_that_has_no_time_for_it_if_it_can(
    age_ms: float, waits: bool
) -> None:
    view = spacious(
        online=[Candidate("decode", 1, 20, True, 2)],
        waiting_online=[Candidate("prompt", 400, 0, age_ms=age_ms)],
        slo=Slo(ttft_ms=1000.0, tbt_ms=10.2),
    )
    assert ("prompt" not in Conserve().plan(view).tokens) == waits


@pytest.mark.parametrize(("tbt_ms", "tokens"), [(20.0, range(1, 101)), (10.2, range(400, 401))])
def test_a_preempted_request_is_computed_again_at_the_pace_that_others_bear(
    tbt_ms: float, tokens: range
) -> None:
    """It has its first token, so that its age is no delay of one; it does not wait for all that decode."""
    view = spacious(
        online=[Candidate("decode", 1, 20, True, 2)],
        waiting_online=[Candidate("again", 400, 0, age_ms=20_000.0, answered=True)],
        slo=Slo(ttft_ms=1000.0, tbt_ms=tbt_ms),
    )
    assert Conserve().plan(view).tokens["again"] in tokens


def test_an_online_prompt_does_not_hold_up_first_tokens_unless_many_wait() -> None:
    """A token takes 0.1 ms, an iteration 10 more: together the first waits for 40 ms, apart the second for 10."""
    first, second = Candidate("first", 100, 0), Candidate("second", 400, 0)

    def served(*prompts: Candidate, queued: int, ttft_ms: float = 2000.0) -> list[str]:
        view = spacious(waiting_online=prompts, queued_online=queued, slo=Slo(ttft_ms=ttft_ms))
        return list(Conserve().plan(view).tokens)

    assert served(first, second, queued=2) == ["first"]
    assert served(first, second, queued=20) == ["first", "second"]
    assert served(first, second, queued=2, ttft_ms=inf) == ["first", "second"]
    assert served(first, second._replace(tokens=10), queued=2) == ["first", "second"]
    assert served(first._replace(answered=True), second, queued=2) == ["first", "second"]


def test_a_paced_prompt_that_does_not_fit_computes_one_token() -> None:
    view = spacious(offline=[Candidate("r", 500, 0, False, 40)], slo=Slo(tbt_ms=1.0))
    assert Paced().plan(view).tokens == {"r": 1}


@pytest.mark.parametrize("spare", [{"reserved_slots": 3}, {"reserved_blocks": 30}])
def test_what_is_reserved_for_online_requests_is_not_given_to_further_offline_ones(
    spare: dict[str, int],
) -> None:
    waiting = [Candidate(f"offline-{number}", 10, 0) for number in range(10)]
    model = ConServeModel.of(0, 0, 0, 0, 0, 0, 0, 1.0)
    view = View(
        offline=[Candidate("running", 10, 0)], waiting_offline=waiting, model=model, slo=Slo(),
        max_tokens=2048, free_slots=8, free_blocks=50, block_tokens=2, **spare,
    )  # fmt: skip
    plan = Conserve().plan(view)
    assert len(plan.admitted) == {"reserved_slots": 5, "reserved_blocks": 3}[next(iter(spare))]
    alone = Conserve().plan(replace(view, offline=[], reserved_blocks=50))
    assert alone.admitted[0] == "offline-0"  # one may always run


def test_what_is_reserved_is_used_by_rows_that_lose_nothing_with_their_memory() -> None:
    waiting = [Candidate(f"offline-{number}", 10, 0) for number in range(10)]
    model = ConServeModel.of(0, 0, 0, 0, 0, 0, 0, 1.0)

    def admitted(*, saved: bool) -> int:
        view = View(
            offline=[Candidate("running", 1, 40, decode=True, blocks=21, saved=saved)],
            waiting_offline=waiting, model=model, slo=Slo(), max_tokens=2048, free_slots=8,
            free_blocks=50, reserved_blocks=30, block_tokens=2,
        )  # fmt: skip
        return len(Conserve().plan(view).admitted)

    assert admitted(saved=False) == 4
    assert admitted(saved=True) == 8  # of 30 blocks 21 could be freed at once


def test_blocks_that_several_rows_share_are_reserved_once() -> None:
    rows = [Candidate(f"row{n}", 1, 160, decode=True, blocks=10, saved=True) for n in range(4)]
    view = spacious(offline=rows, reserved_blocks=50, used_blocks=16)  # eight of them are shared
    assert revocable_blocks(view) == 16
    assert revocable_blocks(replace(view, used_blocks=40)) == 40
    own = Candidate("parked", 1, 160, blocks=20)
    assert revocable_blocks(replace(view, used_blocks=40, waiting_with_blocks=[own])) == 20, (
        "what it has is its own"
    )
    assert revocable_blocks(replace(view, used_blocks=26, online=[Candidate("live", 1, 160, True, 10)])) == 16


def test_a_row_that_has_its_kv_back_is_not_refused_for_the_reserve() -> None:
    row = Candidate("row", 1, 319, blocks=20)
    others = [Candidate("other", 1, 40, decode=True, blocks=3)]
    view = spacious(offline=others, waiting_offline=[row], free_blocks=5, reserved_blocks=30)
    assert Conserve().plan(view).admitted == []
    assert Conserve().plan(replace(view, waiting_with_blocks=[row])).admitted == ["row"]


def test_kv_that_came_back_to_a_row_that_waits_is_taken_again_for_a_live_request() -> None:
    row = Candidate("row", 1, 320, blocks=20)
    view = spacious(
        waiting_online=[Candidate("live", 400, 0)],
        waiting_offline=[row],
        waiting_with_blocks=[row],
        free_blocks=12,
        block_tokens=16,
    )
    for policy in (Conserve(), OnlineOnly()):
        plan = policy.plan(view)
        assert plan.evicted == ["row"]
        assert plan.tokens == {"live": 400}


def test_a_row_that_grows_alone_takes_the_room_of_one_that_waits() -> None:
    held = Candidate("held", 1, 320, blocks=20)
    view = spacious(
        offline=[Candidate("row", 1, 64, True, 4)],
        waiting_offline=[held],
        waiting_with_blocks=[held],
        free_blocks=0,
        block_tokens=16,
    )
    plan = Conserve().plan(view)
    assert plan.evicted == ["held"]
    assert "row" in plan.tokens


def test_what_comes_back_for_one_row_is_not_brought_for_others_too() -> None:
    rows = [Candidate(f"r{n}", 100, 0, restorable=99, prefix=["p"] * 6) for n in range(3)]
    plan = Conserve().plan(spacious(waiting_offline=[*rows, Candidate("fresh", 100, 0)], block_tokens=16))
    assert plan.restored == ["r0"]
    assert plan.tokens == {"fresh": 100}
    later = spacious(waiting_offline=rows[1:], coming=frozenset(["p"]), block_tokens=16)
    assert not Conserve().plan(later).restored


@pytest.mark.parametrize("decode", [True, False])
def test_an_idle_engine_computes_something_whatever_its_model_says(decode: bool) -> None:
    slow = ConServeModel.of(*[1e6] * 8)  # so that no typical prompt keeps its promise, and none could wait
    view = spacious(model=slow, slo=Slo(ttft_ms=1000, tbt_ms=100), prompt_tokens=500)
    view = replace(view, waiting_offline=[Candidate("r", 100, 0)])
    if decode:
        view = replace(view, waiting_offline=(), offline=[Candidate("r", 1, 900, True, 60)])
    assert Conserve().plan(view).total == (1 if decode else view.block_tokens)


def test_blocks_kept_for_arrivals_are_those_of_rows_that_lose_nothing_first() -> None:
    """Ten blocks are reserved; what a row can be spared of them others may use."""
    saved = Candidate("saved", 1, 60, True, 4, saved=True)
    held = Candidate("held", 1, 40, blocks=3, saved=True)
    own = Candidate("own", 1, 60, True, 4)
    for view, blocks in (
        (view_of(reserved_blocks=10), 0),
        (view_of(reserved_blocks=10, offline=[own]), 0),
        (view_of(reserved_blocks=10, offline=[saved, own]), 4),
        (view_of(reserved_blocks=10, offline=[saved, own], waiting_with_blocks=[held]), 7),
        (view_of(reserved_blocks=0, offline=[saved]), 0),
        (view_of(reserved_blocks=10, offline=[saved, own], used_blocks=7), 3),  # one of them is shared
        (view_of(reserved_blocks=10, offline=[saved, own], used_blocks=3), 0),
        (view_of(reserved_blocks=10, offline=[saved], online=[own], used_blocks=7), 3),
    ):
        assert revocable_blocks(view) == blocks
        composer = Composer(view)
        assert composer.reserved_blocks == view.reserved_blocks - blocks
        if view.offline and view.offline[0].saved:
            composer.evict(view.offline[0])
            assert composer.reserved_blocks == max(0, view.reserved_blocks - max(0, blocks - 4))


def test_decode_steps_are_added_at_once_as_they_would_be_one_by_one() -> None:
    steps = [*decodes(2), Candidate("speculative", 3, 60, True, 4), Candidate("grows", 1, 64, True, 4)]
    at_once, one_by_one = Composer(view_of()), Composer(view_of())
    add_steps(at_once, steps)
    for step in steps:
        one_by_one.add(step, step.tokens)
    assert at_once.plan() == one_by_one.plan()
    assert at_once.free_blocks == one_by_one.free_blocks == 1000 - 1
    assert at_once.tokens_left == one_by_one.tokens_left == 2048 - 6


@pytest.mark.parametrize(("free_blocks", "steps"), [(0, 2), (1, 3), (2, 4), (9, 4)])
def test_as_many_decode_steps_run_as_there_are_blocks_for(free_blocks: int, steps: int) -> None:
    growing = [Candidate(f"grows{n}", 1, 64, True, 4) for n in range(2)]
    composer = Composer(view_of(free_blocks=free_blocks))
    assert composer.add_decodes(composer.steps([*decodes(2), *growing]), inf) == steps
    assert len(composer.tokens) == steps


@pytest.mark.parametrize(("max_tokens", "steps"), [(1, 1), (2, 2), (4, 2), (5, 3), (6, 4)])
def test_as_many_decode_steps_run_as_there_are_tokens_for(max_tokens: int, steps: int) -> None:
    wanted = [*decodes(2), Candidate("speculative", 3, 40, True, 4), *decodes(1, "last")]
    for limit_ms in (inf, 1000.0):
        assert fitting(Composer(view_of(max_tokens=max_tokens)), wanted, limit_ms) == steps


@pytest.mark.parametrize(
    ("limit_ms", "steps"), [(10.9, 0), (11, 1), (12, 2), (14, 2), (15, 3), (16, 4), (99, 4)]
)
def test_as_many_decode_steps_run_as_there_are_milliseconds_for(limit_ms: float, steps: int) -> None:
    wanted = [*decodes(2), Candidate("speculative", 3, 40, True, 4), *decodes(1, "last")]
    assert fitting(Composer(view_of()), wanted, limit_ms) == steps
    beside = Composer(view_of())
    beside.add(Candidate("dear", 1, 0, surcharge_ms=5.0), 1)
    assert fitting(beside, wanted, limit_ms + 6) == steps


def test_a_plan_says_what_offline_tokens_had_to_fit_into() -> None:
    composer = Composer(view_of())
    assert composer.plan().limit_ms is None
    assert composer.plan().predicted_ms == 0
    composer.add(Candidate("online", 5, 0), 5)
    composer.begin_offline(50.0)
    assert composer.plan().limit_ms is None, "no offline tokens"
    composer.add(Candidate("offline", 5, 0), 5)
    assert composer.plan().limit_ms == 50.0
    assert composer.plan().predicted_ms == 20.0


@pytest.mark.parametrize("restorable", [0, 99])
def test_a_class_whose_prompt_finds_no_room_holds_up_no_prompt_that_runs(restorable: int) -> None:
    agents = [Candidate(f"agent{n}", 16, 16, blocks=2) for n in range(2)]  # in the blocks that they have
    chats = [Candidate(f"chat{n}", 100, 0, restorable=restorable) for n in range(2)]
    row = Candidate("row", 16, 0, blocks=1)  # as it has its block, it would fit
    plan = plan_of(
        online=agents,
        waiting_online=chats,
        offline=[row],
        free_blocks=0,
        slos={"chat": Slo(), "agent": Slo()},
        classes={"agent0": "agent", "agent1": "agent", "chat0": "chat", "chat1": "chat"},
        served={"chat": 0.0, "agent": 50.0},
    )
    assert plan.tokens == {"agent0": 16, "agent1": 16}
    assert not plan.evicted, "the row's block would not make enough room"


def test_a_class_that_was_served_less_leaves_running_prompts_their_kv_blocks() -> None:
    agent = Candidate("agent", 32, 16, blocks=1)  # lacks two blocks
    changes: dict[str, Any] = {
        "online": [agent],
        "waiting_online": [Candidate("chat", 16, 0)],
        "slos": {"chat": Slo(), "agent": Slo()},
        "classes": {"agent": "agent", "chat": "chat"},
        "served": {"chat": 0.0, "agent": 50.0},
    }
    assert plan_of(**changes, free_blocks=2).tokens == {"agent": 32}
    assert [*plan_of(**changes, free_blocks=3).tokens] == ["chat", "agent"]


def test_blocks_that_rows_leave_for_live_prefixes_are_room_for_arrivals_too() -> None:
    """Each may be a half of the memory: the sum would leave rows nothing."""
    room = {"free_blocks": 100, "kept_blocks": 50, "waiting_offline": [FRESH]}  # seven blocks
    offline = decodes(3, "row")
    assert "fresh" in plan_of(**room, reserved_blocks=50, offline=offline).tokens
    assert "fresh" in plan_of(**room, reserved_blocks=90, offline=offline).tokens
    assert "fresh" not in plan_of(**room, reserved_blocks=95, offline=offline).tokens
    assert "fresh" not in plan_of(**{**room, "kept_blocks": 95}, reserved_blocks=50, offline=offline).tokens


def test_rows_yield_to_a_live_request_that_waits_for_the_adapter_of_others() -> None:
    """It waits until these are done, and rows would make their steps longer."""
    running, waiting = decodes(2, "live"), Candidate("wants", 10, 0)
    adapters = {"live0": 1, "live1": 1, "wants": 2}
    beside = {"online": running, "waiting_offline": [FRESH], "adapters": adapters}
    assert "fresh" in plan_of(**beside, most_adapters=1).tokens
    assert "fresh" not in plan_of(**beside, waiting_online=[waiting], queued_online=1, most_adapters=1).tokens
    both = plan_of(**beside, waiting_online=[waiting], queued_online=1, most_adapters=2)
    assert {"fresh", "wants"} <= both.tokens.keys()
