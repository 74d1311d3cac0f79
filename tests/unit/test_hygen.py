"""HyGen's policies: the two phases, the budgets, the order of rows; its terms over HTTP."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from conserve.engine.policy.hygen import (
    MOST_ORDERED,
    by_prefix,
    depth_first,
    draw,
    hygen,
    hygen_star,
    sarathi_plus,
)
from conserve.engine.policy.view import Candidate
from conserve.engine.vllm.scheduling.row_terms import RowTerms
from tests.policy_views import FRESH, ROW, decodes, view_of

ROWS = [Candidate(f"row{n}", 100, 0) for n in range(3)]


def plan(policy: Any = None, **changes: Any) -> dict[str, int]:
    return dict((policy or hygen()).plan(view_of(**changes)).tokens)


def alike(name: str, *prefix: str) -> Candidate:
    return Candidate(name, 100, 0, prefix=prefix)


class TestPhases:
    """One ms a token and ten for each iteration."""

    def test_rows_get_what_the_latency_budget_leaves(self) -> None:
        assert plan(online=decodes(2), waiting_offline=ROWS, budget_ms=50.0) == {
            "decode0": 1,
            "decode1": 1,
            "row0": 38,
        }

    def test_prompts_of_live_requests_keep_the_budget_too(self) -> None:
        prompt = Candidate("prompt", 100, 0)
        assert plan(waiting_online=[prompt], waiting_offline=ROWS, budget_ms=50.0) == {"prompt": 40}

    def test_decode_steps_of_live_requests_run_whatever_the_budget(self) -> None:
        prompt = Candidate("prompt", 100, 0)
        view = {"online": decodes(30), "waiting_online": [prompt], "waiting_offline": ROWS}
        assert set(plan(**view, budget_ms=20.0)) == {f"decode{n}" for n in range(30)}

    def test_a_budget_below_the_smallest_iteration_stops_no_work(self) -> None:
        prompt = Candidate("prompt", 100, 0)
        assert plan(waiting_online=[prompt], budget_ms=5.0) == {"prompt": 100}
        assert plan(waiting_offline=ROWS, budget_ms=5.0) == {"row0": 16}

    def test_rows_are_evicted_for_the_memory_of_live_requests(self) -> None:
        prompt, running = Candidate("prompt", 100, 0), decodes(4, "row")
        found = hygen().plan(
            view_of(waiting_online=[prompt], offline=running, free_blocks=1, budget_ms=500.0)
        )
        assert found.admitted == ["prompt"]
        assert found.evicted == ["row3", "row2", "row1"]

    def test_rows_whose_kv_host_memory_has_are_evicted_first(self) -> None:
        saved, other = decodes(2, "row")
        found = hygen().plan(
            view_of(waiting_online=[FRESH], offline=[saved._replace(saved=True), other], free_blocks=5)
        )
        assert found.evicted == ["row0"]

    def test_a_prompt_that_runs_goes_on_and_rows_have_the_rest(self) -> None:
        prompt = Candidate("prompt", 25, 0)
        found = hygen().plan(view_of(online=[prompt], waiting_offline=ROWS, budget_ms=50.0))
        assert (found.tokens, found.admitted) == ({"prompt": 25, "row0": 15}, ["row0"])

    def test_beside_a_prompt_that_was_cut_short_nothing_else_begins(self) -> None:
        found = hygen().plan(view_of(online=[FRESH], waiting_offline=[ROW], budget_ms=50.0))
        assert (found.tokens, found.restored) == ({"fresh": 40}, [])

    @pytest.mark.parametrize(
        ("room", "comes"),
        [
            ({"max_tokens": 2}, True),
            ({"max_tokens": 1}, False),
            ({"free_blocks": 7}, True),
            ({"free_blocks": 6}, False),
        ],
    )
    def test_a_live_request_comes_back_where_there_is_room_for_all_of_it(
        self, room: dict[str, int], comes: bool
    ) -> None:
        found = hygen().plan(view_of(online=decodes(1), waiting_online=[ROW], **room))
        assert found.restored == (["row"] if comes else [])
        assert found.tokens == {"decode0": 1}, "its tokens are copied back, not computed"

    def test_a_running_prompt_gets_what_the_budget_leaves_though_slots_are_lacking(self) -> None:
        prompt = Candidate("prompt", 100, 0, blocks=7)
        view = view_of(online=[*decodes(1), prompt], offline=decodes(1, "row"), free_slots=-1, budget_ms=51.0)
        found = hygen().plan(view)
        assert (found.tokens, found.evicted) == ({"decode0": 1, "prompt": 40}, ["row0"])

    def test_one_whose_lora_adapter_live_requests_keep_away_holds_up_no_other(self) -> None:
        wants, other = Candidate("wants", 10, 0), Candidate("other", 20, 0)
        queue = {"online": decodes(1), "waiting_online": [wants, other], "budget_ms": 150.0}
        adapters = {"decode0": 1, "wants": 2}
        assert plan(**queue, adapters=adapters, most_adapters=1) == {"decode0": 1, "other": 20}
        assert plan(**queue, adapters=adapters, most_adapters=2) == {"decode0": 1, "wants": 10, "other": 20}

    def test_one_that_comes_back_holds_up_no_other(self) -> None:
        view = view_of(waiting_online=[ROW, FRESH], waiting_offline=ROWS[:1], budget_ms=150.0)
        found = hygen().plan(view)
        assert (found.restored, found.tokens) == (["row"], {"fresh": 100, "row0": 40})

    def test_where_live_requests_lack_blocks_no_row_runs(self) -> None:
        live = Candidate("live", 64, 32, True, 2)  # lacks four blocks
        rows = [Candidate(f"row{n}", 1, 8, True, 1) for n in range(2)]  # have what they need
        found = hygen().plan(view_of(online=[live], offline=rows, free_blocks=0))
        assert (found.tokens, found.evicted) == ({"live": 64}, []), "the rows' blocks would not be enough"
        assert plan(online=[live], offline=rows, free_blocks=4) == {"live": 64, "row0": 1, "row1": 1}

    @pytest.mark.parametrize("policy", [sarathi_plus(), hygen_star()])
    def test_without_a_latency_budget_the_token_budget_is_the_limit(self, policy: Any) -> None:
        given = {"online": decodes(1), "waiting_offline": ROWS, "budget_ms": 20.0, "max_tokens": 151}
        assert plan(policy, **given) == {"decode0": 1, "row0": 100, "row1": 50}

    def test_rows_begin_at_the_fixed_rate_only_under_that_policy(self) -> None:
        given: dict[str, Any] = {"offline": decodes(1, "running"), "waiting_offline": ROWS, "rows_due": 1}
        assert set(plan(hygen_star(), **given)) == {"running0", "row0"}
        assert len(plan(sarathi_plus(), **given)) == 4
        assert len(plan(hygen(), **given)) == 4
        assert plan(hygen_star(), waiting_offline=ROWS, rows_due=0) == {}
        assert len(plan(hygen_star(), **{**given, "rows_due": None})) == 4, "no rate is given"


class TestOrder:
    """Algorithm 4: the next of the prefix tree, or the stalest."""

    def test_rows_of_one_branch_come_together_and_branches_by_age(self) -> None:
        rows = [
            alike("what-ml", "what", "is", "ml"),
            alike("how-code", "how", "to"),
            alike("what-ai", "what", "is", "ai"),
            alike("alone"),
            alike("how-debug", "how", "to"),
            alike("what-ml-2", "what", "is", "ml"),
        ]
        found = [row.name for row in depth_first(rows)]
        assert found == ["what-ml", "what-ml-2", "what-ai", "how-code", "how-debug", "alone"]

    def test_branches_part_at_each_block(self) -> None:
        """A name of a block stands for all tokens up to its end, so no two branches share a name."""
        for rows in (
            [alike("a1", "a"), alike("b", "b"), alike("a2", "a")],
            [alike("ax1", "a", "ax"), alike("ay", "a", "ay"), alike("ax2", "a", "ax")],
        ):
            assert [*depth_first(rows)] == [rows[0], rows[2], rows[1]]

    def test_long_equal_beginnings_take_no_recursion(self) -> None:
        rows = [alike(f"row{n}", *(["same"] * 5000), str(n)) for n in range(3)]
        assert [row.name for row in depth_first(rows)] == ["row0", "row1", "row2"]

    def test_every_row_comes_once_whatever_the_utility(self) -> None:
        rows = [alike(f"row{n}", f"group{n % 3}", f"own{n}") for n in range(40)]
        for utility in (1e-9, 0.5, 0.9, 1.0):
            assert Counter(row.name for row in by_prefix(rows, utility)) == Counter(row.name for row in rows)
        assert [row.name for row in by_prefix(rows, 1e-9)] == [row.name for row in rows]
        assert list(by_prefix(rows, 1.0)) == list(depth_first(rows))

    def test_draws_are_even_and_always_the_same(self) -> None:
        drawn = [draw(f"old{n}", f"near{n}") for n in range(2000)]
        assert sum(number < 0.9 for number in drawn) / len(drawn) == pytest.approx(0.9, abs=0.03)
        assert all(0 <= number < 1 for number in drawn)
        assert drawn[7] == draw("old7", "near7") != draw("near7", "old7")

    @pytest.mark.parametrize(
        ("policy", "admitted"),
        [(hygen(), ["a1", "a2"]), (hygen_star(), ["a1", "b1"]), (sarathi_plus(), ["a1", "b1"])],
    )
    def test_only_hygen_takes_rows_by_their_prefixes(self, policy: Any, admitted: list[str]) -> None:
        rows = [alike("a1", "a", "ax"), alike("b1", "b"), alike("a2", "a", "ay")]
        cached = [row._replace(context=16, blocks=1) for row in rows]  # their first block
        view = view_of(waiting_offline=cached, utility=1.0, free_slots=2, budget_ms=1e6)
        assert policy.plan(view).admitted == admitted

    def test_rows_are_read_as_far_as_they_are_ordered_or_fit(self) -> None:
        def endless() -> Iterator[Candidate]:
            for n in range(10**9):
                read.append(n)
                yield Candidate(f"row{n}", 100, 0)

        for policy, most in ((hygen(), MOST_ORDERED), (sarathi_plus(), 1)):
            read: list[int] = []
            policy.plan(view_of(waiting_offline=endless(), max_tokens=80))
            assert len(read) == most


class WaitingRow:
    """Part of vLLM's request that terms look at."""

    def __init__(self, num_preemptions: int) -> None:
        self.num_preemptions = num_preemptions


NEW: Any = WaitingRow(0)
EVICTED: Any = WaitingRow(1)


class TestTerms:
    """Parameters as `POST /v1/conserve` brings them."""

    def test_rows_are_due_at_the_rate_the_first_at_once(self) -> None:
        terms = RowTerms.of({"offline_per_s": 2.0}, now=100.0)
        assert terms.of_view(100.0, 64, [])["rows_due"] == 1
        terms.began([NEW, EVICTED])
        assert terms.of_view(100.4, 64, [NEW, NEW])["rows_due"] == 0
        assert terms.of_view(101.6, 64, [NEW, NEW])["rows_due"] == 3
        assert RowTerms.of({"budget_ms": 80.0}, now=0.0).of_view(9.0, 64, [NEW]) == {
            "budget_ms": 80.0,
            "max_tokens": 64,
            "rows_due": None,
            "utility": 0.9,
        }

    def test_a_row_that_gave_its_place_up_waits_for_no_rate(self) -> None:
        """The rate is of rows that come; at a low one the next is due after minutes."""
        terms = RowTerms.of({"offline_per_s": 0.01}, now=0.0)
        terms.began([NEW])
        assert terms.of_view(10.0, 64, [EVICTED, NEW])["rows_due"] == 1
        assert terms.of_view(101.0, 64, [EVICTED, NEW])["rows_due"] == 2

    @pytest.mark.parametrize(("tokens", "most"), [(16, 16), (64, 64), (4096, 64)])
    def test_an_iteration_is_no_longer_than_the_engine_takes(self, tokens: int, most: int) -> None:
        assert RowTerms.of({"tokens": tokens}, now=0.0).of_view(0.0, 64, [])["max_tokens"] == most

    @pytest.mark.parametrize(
        "wrong",
        [
            {"budget": 1.0},
            {"budget_ms": 0},
            {"utility": 1.5},
            {"budget_ms": "fast"},
            {"tokens": 0},
            {"tokens": 1.5},
        ],
    )
    def test_senseless_terms_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises((ValueError, TypeError)):
            RowTerms.of(wrong, now=0.0)


def test_a_row_alone_starts_under_each_of_them() -> None:
    for policy in (hygen(), hygen_star(), sarathi_plus()):
        assert plan(policy, waiting_offline=[FRESH]) == {"fresh": 100}
