"""Online requests first, offline requests after them: who is served, in which order, and who is not."""

from collections.abc import Iterator
from typing import Any

import pytest

from conserve.engine.policy.conserve import Conserve, arrival_limit_ms, bearable_ms
from conserve.engine.policy.offline import MOST_HELD
from conserve.engine.policy.paced import Paced
from conserve.engine.policy.policies import CONSERVE, POLICIES, SERVING
from conserve.engine.policy.view import OFFLINE_PRIORITY, Candidate, Slo
from conserve.profiles.conserve import ConServeModel
from tests.policy_views import FRESH, ROW, decodes, plan_of, view_of

PROMPT = Candidate("prompt", 100, 0)
SMALL = Candidate("small", 16, 0)  # one KV block
ROWS = tuple(Candidate(f"row{n}", 1, 60, True, 4) for n in range(3))
DEAR = Candidate("dear", 20, 0, surcharge_ms=29.0)  # 30 ms a token
CHEAP = Candidate("cheap", 20, 0)


def growing(count: int, blocks: int) -> list[Candidate]:
    """Rows that run, and whose next token needs a KV block."""
    return [Candidate(f"row{n}", 1, 16 * blocks, True, blocks) for n in range(count)]


def alike(count: int) -> list[Candidate]:
    """Rows that wait and begin alike, of seven KV blocks each."""
    return [Candidate(f"alike{n}", 100, 0, prefix=[f"p{n}" for n in range(6)]) for n in range(count)]


class TestOnlineShare:
    """Phase 1: what online requests get, and whether anything is left to phase 2."""

    def test_prompts_alone_are_not_cut_to_a_tbt_that_nobody_waits_for(self) -> None:
        slo = Slo(ttft_ms=1000, tbt_ms=25)
        assert plan_of(waiting_online=[PROMPT], slo=slo).tokens == {"prompt": 100}
        assert plan_of(waiting_online=[PROMPT], slo=slo, online=decodes(1)).tokens["prompt"] == 14

    def test_a_prompt_under_way_has_its_slot(self) -> None:
        under_way = Candidate("prompt", 100, 32, False, 2)
        plan = plan_of(online=[under_way], offline=ROWS, free_slots=0)
        assert plan.tokens == {"prompt": 100, "row0": 1, "row1": 1, "row2": 1}
        assert (plan.admitted, plan.preempted) == ([], [])

    def test_decode_steps_take_the_slots_that_are_missing_from_the_last_rows(self) -> None:
        """Requests whose KV comes back are counted as running, and may be more than there are slots."""
        plan = plan_of(online=decodes(1), offline=ROWS, free_slots=-1)
        assert plan.preempted == ["row2"]

    def test_one_that_comes_back_wants_a_single_token_of_the_iteration(self) -> None:
        back = PROMPT._replace(restorable=99)
        assert plan_of(waiting_online=[back], max_tokens=1).restored == ["prompt"]

    @pytest.mark.parametrize(
        ("age_ms", "answered", "limit_ms"), [(950, False, 50), (950, True, 110), (0, False, 110)]
    )
    def test_the_first_token_of_one_that_comes_back_is_not_held_up(
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
    def test_where_one_has_no_memory_offline_requests_do_not_start(self, back: int) -> None:
        prompt = PROMPT._replace(restorable=back)
        assert not plan_of(waiting_online=[prompt], waiting_offline=[SMALL], free_blocks=6).tokens

    def test_where_one_is_held_up_offline_requests_do_not_start(self) -> None:
        """The second prompt would take 12 ms of the first one's, and an iteration of its own 11 ms."""
        first, second = Candidate("first", 50, 0), Candidate("second", 12, 0)
        slo = Slo(ttft_ms=1000)
        plan = plan_of(waiting_online=[first, second], waiting_offline=[SMALL], slo=slo)
        assert plan.tokens == {"first": 50}
        shorter = second._replace(tokens=11)
        plan = plan_of(waiting_online=[first, shorter], waiting_offline=[SMALL], slo=slo)
        assert plan.tokens == {"first": 50, "second": 11, "small": 16}

    def test_where_one_is_cut_neither_online_nor_offline_requests_are_served_after_it(self) -> None:
        """A step and one of its tokens take 41 of 55 ms, and others would fit into the rest."""
        slo = Slo(ttft_ms=1e6, tbt_ms=55)
        short = CHEAP._replace(tokens=10)
        plan = plan_of(online=decodes(1), waiting_online=[DEAR, short], waiting_offline=[SMALL], slo=slo)
        assert plan.tokens == {"decode0": 1, "dear": 1}


class TestGrowth:
    """Decode steps of offline rows that need KV blocks where none are free."""

    def test_it_is_not_for_prompts_that_rows_are_preempted(self) -> None:
        prompt = Candidate("prompt", 100, 0, False, 1)
        plan = plan_of(offline=[*decodes(1), prompt], free_blocks=0)
        assert (plan.tokens, plan.preempted) == ({"decode0": 1}, [])

    def test_the_last_row_that_is_saved_makes_room_else_the_last(self) -> None:
        rows = growing(4, blocks=4)
        saved = [row._replace(saved=True) for row in rows[:3]]
        assert plan_of(offline=[*saved, rows[3]], free_blocks=0).preempted == ["row2"]
        assert plan_of(offline=rows, free_blocks=0).preempted == ["row3"]

    def test_a_row_that_has_gone_does_not_grow(self) -> None:
        """Three rows want a block each; one gives the two that the others want."""
        plan = plan_of(offline=growing(3, blocks=2), free_blocks=0)
        assert (plan.tokens, plan.preempted) == ({"row0": 1, "row1": 1}, ["row2"])

    def test_a_prompt_under_way_gives_its_blocks_to_decode_steps_before_it(self) -> None:
        prompt = Candidate("prompt", 100, 0, False, 1)
        plan = plan_of(offline=[*growing(2, blocks=1), prompt], free_blocks=1)
        assert (plan.tokens, plan.preempted) == ({"row0": 1, "row1": 1}, ["prompt"])


class TestOfflineShare:
    """Phase 2: waiting rows are taken in order, as far as they fit."""

    def test_a_row_comes_back_although_there_is_no_time_for_those_that_run(self) -> None:
        plan = Paced().plan(view_of(slo=Slo(tbt_ms=12), offline=decodes(3), waiting_offline=[ROW]))
        assert (list(plan.tokens), plan.restored) == (["decode0", "decode1"], ["row"])

    def test_nobody_goes_past_a_row_that_has_no_memory(self) -> None:
        assert not plan_of(waiting_offline=[FRESH, SMALL], free_blocks=6).tokens
        assert list(plan_of(waiting_offline=[FRESH, SMALL], free_blocks=8).tokens) == ["fresh", "small"]

    @pytest.mark.parametrize("policy", [Conserve(), Paced()])
    @pytest.mark.parametrize(
        ("slots", "looked_at"),
        [({"free_slots": 0}, 1), ({"free_slots": 1}, 2), ({"free_slots": 5, "reserved_slots": 4}, 2)],
    )
    def test_rows_for_which_there_is_no_slot_are_not_looked_at(
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

    def test_what_waits_is_a_prompt_and_costs_what_prompts_cost(self) -> None:
        model = ConServeModel.of(1, 0, 0, 0, 0, 5, 0, 10)  # 5 ms for each prompt
        plan = plan_of(model=model, waiting_offline=[FRESH], offline=decodes(1))
        assert plan.predicted_ms == 10 + 100 + 5 + 1

    def test_the_first_row_of_an_idle_engine_may_take_what_is_reserved_and_no_other(self) -> None:
        plan = plan_of(waiting_offline=[FRESH, SMALL], reserved_blocks=999)
        assert plan.admitted == ["fresh"]


class TestHeldOut:
    """Rows that wait for what another one computes are the last to be taken in the same iteration."""

    def test_those_behind_the_rows_that_can_be_held_out_are_taken_after_them(self) -> None:
        rows = alike(1 + MOST_HELD)
        plan = plan_of(waiting_offline=[*rows, ROW, SMALL], max_tokens=10_000)
        assert plan.admitted == [*(row.name for row in rows), "small"]
        assert plan.restored == ["row"]

    def test_nobody_goes_past_one_of_them_that_cannot_come_back(self) -> None:
        """33 rows leave 19 blocks: the row wants 7 beside the 16 that are kept free, the small one 1."""
        rows = alike(1 + MOST_HELD)
        plan = plan_of(waiting_offline=[*rows, ROW, SMALL], max_tokens=10_000, free_blocks=33 * 7 + 19)
        assert (plan.admitted, plan.restored) == ([row.name for row in rows], [])
        plan = plan_of(waiting_offline=[*rows, SMALL], max_tokens=10_000, free_blocks=33 * 7 + 19)
        assert plan.admitted[-1] == "small"

    def test_they_are_taken_as_long_as_tokens_and_blocks_are_left(self) -> None:
        assert plan_of(waiting_offline=alike(3), max_tokens=200).tokens == {"alike0": 100, "alike1": 100}
        assert plan_of(waiting_offline=alike(3), free_blocks=14).tokens == {"alike0": 100, "alike1": 100}
        assert plan_of(waiting_offline=alike(3), free_blocks=13).tokens == {"alike0": 100}

    def test_none_goes_past_one_that_is_cut(self) -> None:
        """The first takes 110 of 150 ms, and a dear token 30."""
        first, *_ = alike(1)
        rows = [first, *(row._replace(prefix=first.prefix) for row in (DEAR, CHEAP))]
        plan = Paced().plan(view_of(slo=Slo(tbt_ms=150), waiting_offline=rows))
        assert plan.tokens == {"alike0": 100, "dear": 1}


class TestLimits:
    """What iterations are limited to for the sake of arrivals, in the terms that the tables leave out."""

    def test_one_that_cannot_be_preempted_is_not_shortened_for_frequent_arrivals(self) -> None:
        often = view_of(slo=Slo(ttft_ms=1000), arrivals_per_s=20)
        assert arrival_limit_ms(often) == pytest.approx(110)

    def test_a_typical_prompt_is_a_chunk_without_context_or_nothing(self) -> None:
        """20 ms for each request, 1 ms for each token of it or of its context."""
        model = ConServeModel.of(0, 0, 0, 1, 20, 0, 0, 10)
        view = {"model": model, "slo": Slo(ttft_ms=100), "online": decodes(1)}
        assert bearable_ms(view_of(**view, prompt_tokens=30), 10) == 100 - 60
        assert bearable_ms(view_of(**view), 10) == 100 - 10


@pytest.mark.parametrize(
    ("name", "decides", "holds_offline", "spares_offline"),
    [
        ("conserve", True, False, False),
        ("online-only", True, True, False),
        ("non-preemptive", False, False, True),
        ("priority", False, False, False),
        ("paced", True, False, False),
    ],
)
def test_policies_go_by_name_and_say_what_they_leave_to_vllm(
    name: str, decides: bool, holds_offline: bool, spares_offline: bool
) -> None:
    policy = POLICIES[name]()
    assert (policy.decides, policy.holds_offline, policy.spares_offline) == (
        decides,
        holds_offline,
        spares_offline,
    )
    assert (name in SERVING) == (name != "paced")
    assert len(POLICIES) == 5
    assert isinstance(POLICIES[CONSERVE](), Conserve)


def test_harvesters_and_servers_of_all_versions_agree_on_the_priority_of_offline_requests() -> None:
    assert OFFLINE_PRIORITY == 1000
