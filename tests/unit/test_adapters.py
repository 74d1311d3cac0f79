"""LoRA adapters of running requests: which waiting ones fit beside them, and which rows give theirs up."""

from dataclasses import replace
from typing import Any

import pytest

from conserve.engine.policy.adapters import Adapters
from conserve.engine.policy.composer import Composer
from conserve.engine.policy.offline import MOST_PASSED, OVERTAKE_MS
from conserve.engine.policy.plan import Plan
from conserve.engine.policy.view import Candidate
from tests.policy_views import FRESH, decodes, plan_of, view_of

WANTS = Candidate("wants", 10, 0)


def adapters_of(most: int, *, online: str = "", offline: str = "", **waiting: int) -> Adapters:
    """Adapters of running requests, each named by a letter and the number of its adapter: `a1 b2`."""
    named = {name: int(name[1:]) for name in f"{online} {offline}".split()}
    return Adapters(
        view_of(
            online=[Candidate(name, 1, 20, True, 2) for name in online.split()],
            offline=[Candidate(name, 1, 20, True, 2) for name in offline.split()],
            adapters={**named, **waiting},
            most_adapters=most,
        )
    )


class TestFits:
    """So many adapters run at once, and a request without one always may."""

    @pytest.mark.parametrize(("most", "fits"), [(1, False), (2, False), (3, True)])
    def test_another_adapter_fits_until_there_are_as_many_as_may_run(self, most: int, fits: bool) -> None:
        assert adapters_of(most, online="a1 b1", offline="c2", wants=3).fits("wants") == fits

    @pytest.mark.parametrize("running", ["a1", "b2"])
    def test_an_adapter_that_runs_fits_however_many_do(self, running: str) -> None:
        adapters = adapters_of(2, online="a1", offline="b2", wants=int(running[1:]))
        assert adapters.fits("wants")

    def test_a_request_without_an_adapter_fits_and_takes_no_place(self) -> None:
        adapters = adapters_of(1, online="a1", other=2)
        adapters.enter("plain")
        adapters.leave("plain")
        assert adapters.fits("plain")
        assert not adapters.fits("other")

    def test_a_running_request_without_an_adapter_takes_no_place(self) -> None:
        running = [Candidate(name, 1, 20, True, 2) for name in ("plain", "a1")]
        view = view_of(online=running, adapters={"a1": 1, "wants": 2}, most_adapters=2)
        assert Adapters(view).fits("wants")

    def test_the_adapter_of_a_request_that_has_to_wait_a_step_is_used_too(self) -> None:
        view = view_of(online=decodes(1, "a"), adapters={"a0": 1, "wants": 2}, most_adapters=2)
        assert Adapters(view).fits("wants")
        assert not Adapters(replace(view, resting_adapters=[3])).fits("wants")
        assert Adapters(replace(view, resting_adapters=[2, 3])).fits("wants")

    def test_one_that_entered_counts_until_it_has_left_as_often(self) -> None:
        adapters = adapters_of(1, first=1, second=1, other=2)
        assert adapters.fits("other")
        adapters.enter("first")
        adapters.enter("second")
        adapters.leave("first")
        assert not adapters.fits("other")
        adapters.leave("second")
        assert adapters.fits("other")


class TestInTheWay:
    """The fewest rows with whom an adapter goes."""

    @pytest.mark.parametrize(
        ("online", "offline", "rows"),
        [
            ("", "a1 b1 c2", "c2"),
            ("", "a1 b2 c2", "a1"),
            ("d2", "a1 b1 c2", "a1 b1"),  # the second one stays with the live request
            ("d1 e2", "a1 c2", ""),
        ],
    )
    def test_no_adapter_of_a_live_request_goes(self, online: str, offline: str, rows: str) -> None:
        victims = [Candidate(name, 1, 20, True, 2) for name in offline.split()]
        found = adapters_of(2, online=online, offline=offline).in_the_way(victims)
        assert [one.name for one in found] == rows.split()

    def test_rows_without_an_adapter_are_in_no_ones_way(self) -> None:
        plain = Candidate("plain", 1, 20, True, 2)
        running = Candidate("a1", 1, 20, True, 2)
        assert adapters_of(1, offline="a1").in_the_way([plain, running]) == [running]
        assert adapters_of(1, online="a1").in_the_way([plain]) == []


class TestPlan:
    """A live request gets the place of rows, and a row waits for a place."""

    ROWS = decodes(3, "row")

    def plan(self, running: tuple[int, ...], **waiting: Any) -> Plan:
        """The plan where rows of these adapters run, at most two adapters at once, and others wait."""
        adapters = {row.name: adapter for row, adapter in zip(self.ROWS, running, strict=True)}
        view: dict[str, Any] = {"offline": self.ROWS, "most_adapters": 2, "queued_online": 1, **waiting}
        return plan_of(**view, adapters={**adapters, "wants": 3, "fresh": 3})

    def test_rows_of_one_adapter_give_it_up_to_a_live_request(self) -> None:
        plan = self.plan((1, 1, 2), waiting_online=[WANTS])
        assert (plan.evicted, plan.admitted) == (["row2"], ["wants"])
        assert plan.tokens.keys() == {"row0", "row1", "wants"}

    def test_no_row_gives_anything_up_where_the_adapter_fits(self) -> None:
        plan = self.plan((1, 1, 1), waiting_online=[WANTS])
        assert (plan.evicted, plan.admitted) == ([], ["wants"])

    def test_a_row_waits_until_its_adapter_fits_and_others_pass(self) -> None:
        others = [FRESH, Candidate("plain", 10, 0)]
        assert self.plan((1, 1, 2), waiting_offline=others).admitted == ["plain"]
        assert self.plan((1, 1, 1), waiting_offline=others).admitted == ["fresh", "plain"]

    @pytest.mark.parametrize(
        ("waited_ms", "admitted"),
        [(OVERTAKE_MS, ["late", "plain", "later"]), (OVERTAKE_MS + 1, ["plain"])],
    )
    def test_a_row_is_not_overtaken_for_ever_by_rows_whose_adapter_runs(
        self, waited_ms: float, admitted: list[str]
    ) -> None:
        """Otherwise it would wait as long as there are any."""
        names = ("waits", "other", "late", "plain", "later")
        waiting = [Candidate(name, 10, 0, age_ms=waited_ms * (name == "waits")) for name in names]
        plan = plan_of(
            offline=self.ROWS[:1],
            waiting_offline=waiting,
            adapters={"row0": 1, "waits": 2, "other": 2, "late": 1, "later": 1},
            most_adapters=1,
        )
        assert plan.admitted == admitted

    def test_rows_with_the_adapter_of_a_live_request_overtake_it_since_that_one_stays(self) -> None:
        waiting = [Candidate("waits", 10, 0, age_ms=2 * OVERTAKE_MS), Candidate("late", 10, 0)]
        plan = plan_of(
            online=decodes(1, "live"),
            offline=self.ROWS[:1],
            waiting_offline=waiting,
            adapters={"live0": 1, "row0": 1, "waits": 2, "late": 1},
            most_adapters=1,
        )
        assert plan.admitted == ["late"]

    def test_rows_that_came_before_it_overtake_it(self) -> None:
        """The queue is sorted by priority first."""
        waiting = [
            Candidate("waits", 10, 0, age_ms=OVERTAKE_MS),
            Candidate("old", 10, 0, age_ms=9 * OVERTAKE_MS),
        ]
        plan = plan_of(
            offline=self.ROWS[:1],
            waiting_offline=waiting,
            adapters={"row0": 1, "waits": 2, "old": 1},
            most_adapters=1,
        )
        assert plan.admitted == ["old"]

    @pytest.mark.parametrize(("passed", "admitted"), [(MOST_PASSED - 1, ["plain"]), (MOST_PASSED, [])])
    def test_so_many_waiting_rows_are_passed_over_at_most(self, passed: int, admitted: list[str]) -> None:
        waiting = [Candidate(f"passed{number}", 10, 0) for number in range(passed)]
        plan = plan_of(
            offline=self.ROWS[:1],
            waiting_offline=[*waiting, Candidate("plain", 10, 0)],
            adapters={"row0": 1} | {one.name: 2 for one in waiting},
            most_adapters=1,
        )
        assert plan.admitted == admitted

    def test_a_row_that_was_deferred_begins_only_if_its_adapter_still_fits(self) -> None:
        """It waits for the prefix of the first, and the third one takes the place meanwhile."""
        alike = [Candidate(f"alike{n}", 100, 0, prefix=[f"p{n}" for n in range(6)]) for n in range(2)]
        waiting = [*alike, Candidate("third", 10, 0)]
        plan = plan_of(waiting_offline=waiting, adapters={"alike1": 1, "third": 2}, most_adapters=1)
        assert plan.admitted == ["alike0", "third"]

    def test_rows_that_fit_are_not_counted_among_those(self) -> None:
        waiting = [Candidate(f"row{number}", 1, 0) for number in range(MOST_PASSED + 10)]
        plan = plan_of(waiting_offline=waiting, free_slots=1000, adapters={"none": 1}, most_adapters=1)
        assert len(plan.admitted) == MOST_PASSED + 10

    def test_rows_that_give_an_adapter_up_are_no_victims_any_more(self) -> None:
        victims = decodes(2, "row")
        composer = Composer(view_of(offline=victims, adapters={"row0": 1, "wants": 2}, most_adapters=1))
        composer.make_adapter_room(victims, WANTS)
        assert (composer.evicted, [one.name for one in victims]) == (["row0"], ["row1"])

    def test_the_second_of_two_waiting_adapters_waits_once_the_first_has_the_place(self) -> None:
        first, second = Candidate("first", 10, 0), Candidate("second", 10, 0)
        adapters = {"first": 1, "second": 2}
        for online in (True, False):
            queues = {"waiting_online" if online else "waiting_offline": [first, second]}
            plan = plan_of(**queues, queued_online=2 * online, adapters=adapters, most_adapters=1)
            assert plan.admitted == ["first"]


def test_without_a_limit_no_adapter_is_in_the_way() -> None:
    composer = Composer(view_of(offline=decodes(1, "row"), adapters={"row0": 1, "wants": 2}))
    victims = decodes(1, "row")
    assert composer.adapter_fits(WANTS)
    assert composer.adapter_comes(WANTS, [])
    composer.make_adapter_room(victims, WANTS)
    assert (composer.evicted, len(victims)) == ([], 1)
