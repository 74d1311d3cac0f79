"""Phase 1: what online requests bear after a wait, the KV blocks they owe each other, the time of a prompt."""

from typing import Any

import pytest

from conserve.engine.policy.composer import Composer
from conserve.engine.policy.online import chunks_ms
from conserve.engine.policy.online_only import OnlineOnly
from conserve.engine.policy.view import DEFAULT_CLASS, Candidate, Slo
from conserve.profiles.conserve import ConServeModel
from tests.policy_views import FRESH, ROW, add_steps, decodes, plan_of, view_of

PROMPT = Candidate("prompt", 100, 0)  # 7 KV blocks, 110 ms
LEAVE: dict[str, Any] = {"rows_leave": True, "rows_join": True}


class TestAfterATurn:
    """Online requests waited for an iteration of offline rows alone."""

    def test_a_chunk_has_what_the_wait_left_of_the_tbt(self) -> None:
        slo = Slo(ttft_ms=1e4, tbt_ms=40.0)
        for waited_ms, tokens in ((0.0, 29), (15.0, 14)):
            plan = plan_of(
                online=decodes(1), waiting_online=[PROMPT], slo=slo, online_waited_ms=waited_ms, **LEAVE
            )
            assert plan.tokens["prompt"] == tokens

    def test_rows_have_what_the_wait_left_of_the_next_gap(self) -> None:
        slo = Slo(tbt_ms=40.0, largest_tbt_ms=150.0)
        for waited_ms, tokens in ((0.0, 29), (15.0, 14)):
            plan = plan_of(online=decodes(1), offline=[FRESH], slo=slo, online_waited_ms=waited_ms, **LEAVE)
            assert plan.tokens["fresh"] == tokens


def test_without_an_slo_to_keep_a_prompt_is_computed_whole() -> None:
    view = view_of(online=decodes(1), waiting_online=[PROMPT], slo=Slo(ttft_ms=1e4, tbt_ms=40.0))
    assert OnlineOnly().plan(view).tokens == {"decode0": 1, "prompt": 100}
    assert OnlineOnly(keeps_promises=True).plan(view).tokens == {"decode0": 1, "prompt": 29}


class TestOwedBlocks:
    """A prompt that runs takes the KV blocks it lacks before one that waits."""

    running = Candidate("running", 100, 0)

    @pytest.mark.parametrize(("free_blocks", "waits"), [(14, False), (13, True)])
    def test_what_a_running_prompt_got_is_owed_no_more(self, free_blocks: int, waits: bool) -> None:
        plan = plan_of(online=[self.running], waiting_online=[PROMPT], free_blocks=free_blocks)
        assert plan.tokens == {"running": 100} | ({} if waits else {"prompt": 100})

    def test_decode_steps_owe_nothing(self) -> None:
        grows = Candidate("grows", 1, 32, True, 2)
        plan = plan_of(online=[grows], waiting_online=[PROMPT], free_blocks=8)
        assert plan.tokens == {"grows": 1, "prompt": 100}

    def test_where_live_requests_lack_blocks_no_row_runs(self) -> None:
        live = Candidate("live", 64, 32, True, 2)  # lacks four blocks
        rows = [Candidate(f"row{n}", 1, 8, True, 1) for n in range(2)]  # have what they need
        for free_blocks, beside in ((0, {}), (4, {"row0": 1, "row1": 1})):
            plan = plan_of(online=[live], offline=rows, free_blocks=free_blocks)
            assert plan.tokens == {"live": 64} | beside
            assert not plan.evicted, "their blocks would not be enough"
        full = plan_of(online=[live], waiting_online=[ROW], offline=rows, free_blocks=0, max_tokens=64)
        assert (full.tokens, full.restored, full.evicted) == ({"live": 64}, [], [])

    def test_one_that_comes_back_without_room_computes_nothing_meanwhile(self) -> None:
        back = PROMPT._replace(restorable=99)
        assert plan_of(waiting_online=[back], free_blocks=7).restored == ["prompt"]
        without = plan_of(waiting_online=[back, PROMPT._replace(name="next")], free_blocks=6)
        assert (without.restored, without.tokens) == ([], {})

    @pytest.mark.parametrize("max_tokens", [2048, 60])
    def test_a_prompt_without_room_does_not_end_the_turns_of_those_that_run(self, max_tokens: int) -> None:
        """With 60 tokens left it would have been cut short, too."""
        agent = Candidate("agent", 16, 16, blocks=2)
        plan = plan_of(
            online=[agent],
            waiting_online=[PROMPT],
            free_blocks=0,
            max_tokens=max_tokens,
            slos={"agent": Slo(), DEFAULT_CLASS: Slo()},
            classes={"agent": "agent"},
            served={"agent": 50.0},
        )
        assert plan.tokens == {"agent": 16}


def test_a_live_request_that_comes_back_delays_its_first_token_a_fiftieth_of_its_ttft_for_rows() -> None:
    def limit_ms(back: Candidate) -> float | None:
        slo = Slo(ttft_ms=1000.0)
        return plan_of(
            online=decodes(4), waiting_online=[back], waiting_offline=[FRESH], slo=slo, layers=32, **LEAVE
        ).limit_ms

    back = ROW._replace(name="back")
    assert limit_ms(back) == 14 + 20
    assert limit_ms(back._replace(answered=True)) == pytest.approx(550), "its first token is out"


class TestQueue:
    """Prompts behind one that is cut to the TBT of others."""

    slo = Slo(tbt_ms=25.0, ttft_ms=1000.0)

    @pytest.mark.parametrize(("age_ms", "tokens"), [(812, 14), (813, 100)])
    def test_with_classes_a_prompt_waits_for_none_of_the_queue(self, age_ms: int, tokens: int) -> None:
        """Seven chunks and the rest take 188 ms; the next in the queue, 110 more, is of another class."""
        plan = plan_of(
            online=decodes(1),
            waiting_online=[PROMPT._replace(age_ms=age_ms)],
            queued_online=20,
            slo=self.slo,
            slos={DEFAULT_CLASS: self.slo},
        )
        assert plan.tokens["prompt"] == tokens

    @pytest.mark.parametrize(("queued", "tokens"), [(2, 10), (3, 100)])
    def test_those_admitted_before_are_behind_no_more(self, queued: int, tokens: int) -> None:
        """After the first, 10 tokens are left of 25 ms; the second takes 250 ms, and 300 are left to it."""
        first = Candidate("first", 4, 0, answered=True)
        plan = plan_of(
            online=decodes(1),
            waiting_online=[first, PROMPT._replace(age_ms=700)],
            queued_online=queued,
            slo=self.slo,
        )
        assert plan.tokens == {"decode0": 1, "first": 4, "prompt": tokens}


class TestChunks:
    """Time until the first token of a prompt that is computed in chunks."""

    @pytest.mark.parametrize(
        ("tokens", "ms"),
        [
            (15, 31.0),  # at once
            (20, 31.0),
            (21, 31 + 11 + 1),
            (99, 4 * 31 + 11 + 19),
            (100, 4 * 31 + 11 + 20),
            (101, 5 * 31 + 11 + 1),
        ],
    )
    def test_whole_chunks_take_the_limit_and_the_rest_its_own_time(self, tokens: int, ms: float) -> None:
        composer = Composer(view_of())
        add_steps(composer, decodes(1))
        assert chunks_ms(composer, PROMPT._replace(tokens=tokens), 20, 31.0) == ms

    def test_the_rest_attends_to_all_that_was_computed_before(self) -> None:
        attends = ConServeModel.of(1, 0, 0.01, 0, 0, 0, 0, 10)
        composer = Composer(view_of(model=attends))
        last_ms = 10 + 20 + 0.01 * 20 * (48 + 80)
        request = PROMPT._replace(context=48)
        assert chunks_ms(composer, request, 20, 31.0) == pytest.approx(4 * 31 + last_ms)
