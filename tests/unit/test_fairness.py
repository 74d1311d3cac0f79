"""Fairness among classes of live traffic: whose prompt is next, and how long the others wait for a late one."""

from collections.abc import Iterator
from itertools import islice
from math import inf
from typing import Any

import pytest

from conserve.engine.policy.conserve import Conserve
from conserve.engine.policy.fairness import fair_order, others_limit_ms, prompts_in_turn
from conserve.engine.policy.online_only import OnlineOnly
from conserve.engine.policy.view import DEFAULT_CLASS, Candidate, Slo, View, tightest
from tests.policy_views import decodes, view_of

CHAT = Slo(ttft_ms=300.0, tbt_ms=40.0, harm=0.2, largest_ttft_ms=900.0, largest_tbt_ms=60.0)
AGENT = Slo(ttft_ms=2000.0, tbt_ms=100.0, harm=0.1)
SLOS = {"chat": CHAT, "agent": AGENT, DEFAULT_CLASS: Slo(ttft_ms=1000.0)}


def classed(*requests: Candidate, **changes: Any) -> View:
    """A view with classes; a request is of the class that its name begins with."""
    names = [request.name for request in (*requests, *changes.get("waiting_online", ()))]
    own = {name: one for name in names for one in ("chat", "agent") if name.startswith(one)}
    return view_of(
        **{"online": requests, "slos": SLOS, "classes": own, "slo": tightest(SLOS.values()), **changes}
    )


def prompt(name: str, tokens: int = 40) -> Candidate:
    return Candidate(name, tokens, 0)


def turns(view: View, has_room: Any = lambda: True) -> list[str]:
    """Names in the order of their turns, those that begin with a plus."""
    return ["+" * waits + request.name for request, waits in prompts_in_turn(view, has_room)]


class TestTurns:
    """Prompts of several classes."""

    def test_the_class_that_was_served_least_is_next_and_its_tokens_count(self) -> None:
        agents, chats = [prompt("agent0", 100), prompt("agent1")], [prompt(f"chat{n}") for n in range(4)]
        view = classed(*agents, *chats, served={"chat": 0.0, "agent": 50.0})
        # The chats have 40, then 80 tokens; the agent 150.
        assert turns(view) == ["chat0", "chat1", "agent0", "chat2", "chat3", "agent1"]

    def test_a_class_without_a_count_was_served_nothing(self) -> None:
        view = classed(prompt("agent"), *[prompt(f"chat{n}") for n in range(3)], served={"agent": 40.5})
        assert turns(view) == ["chat0", "chat1", "agent", "chat2"]
        assert turns(classed(prompt("agent"), prompt("chat"), served={"agent": 0.5})) == ["chat", "agent"]

    def test_one_that_waits_comes_first_only_if_its_class_was_served_less(self) -> None:
        def order(**served: float) -> list[str]:
            return turns(classed(prompt("agent"), waiting_online=[prompt("chat")], served=served))

        assert order(chat=0.0, agent=10.0) == ["+chat", "agent"]
        assert order(chat=10.0, agent=10.0) == ["agent", "+chat"]
        assert order(chat=20.0, agent=10.0) == ["agent", "+chat"]

    def test_without_room_those_that_run_come_all_the_same(self) -> None:
        view = classed(prompt("agent"), waiting_online=[prompt("chat")], served={"agent": 10.0})
        assert turns(view, lambda: False) == ["agent"]

    def test_without_classes_the_queue_is_not_read_before_its_turn(self) -> None:
        def unread() -> Iterator[Candidate]:
            raise AssertionError("it was read")
            yield

        served = prompts_in_turn(
            view_of(online=[prompt("a"), prompt("b")], waiting_online=unread()), lambda: True
        )
        assert [request.name for request, _ in islice(served, 2)] == ["a", "b"]

    def test_without_classes_those_that_run_come_first(self) -> None:
        view = view_of(online=[prompt("b"), *decodes(1)], waiting_online=[prompt("a"), prompt("c")])
        assert turns(view) == ["b", "+a", "+c"]


def order(*requests: str, **served: float) -> list[str]:
    """Requests of cost 1, which are of the class that is their first letter."""
    return [
        *fair_order(
            requests,
            class_of=lambda name: name[0],
            cost_of=lambda name: 1.0,
            served=served,
            level_of=lambda name: 0,
        )
    ]


def test_a_queue_is_put_in_order_from_nothing_for_a_class_without_a_count() -> None:
    assert order("b1", "a1", b=0.5) == ["a1", "b1"]
    assert order("b1", "a1", "a2", "a3", b=1.5) == ["a1", "a2", "b1", "a3"]


class TestLatePrompt:
    """The longest iteration that other classes bear for a prompt past its TTFT."""

    def limit_ms(self, *beside: str, waited_ms: float = 0.0, **served: float) -> float:
        late = prompt("agent")
        running = [one._replace(name=name) for one, name in zip(decodes(len(beside)), beside, strict=True)]
        view = classed(*running, waiting_online=[late], served=served, online_waited_ms=waited_ms)
        return others_limit_ms(view, late, running)

    def test_a_class_that_was_served_less_keeps_the_tbt_that_it_is_promised_at_most(self) -> None:
        assert self.limit_ms("chat", chat=0.0, agent=500.0) == 60
        assert self.limit_ms("chat", chat=0.0, agent=500.0, waited_ms=15.0) == 45

    def test_the_smallest_tbt_of_several_is_kept(self) -> None:
        assert self.limit_ms("chat", "other", chat=0.0, agent=500.0) == 60, "the other has no TBT"

    @pytest.mark.parametrize("chat", [500.0, 900.0])
    def test_a_class_that_was_served_as_much_waits(self, chat: float) -> None:
        assert self.limit_ms("chat", "agent1", chat=chat, agent=500.0) == inf

    def test_a_class_without_a_count_was_served_nothing(self) -> None:
        assert self.limit_ms("chat", agent=0.5) == 60
        assert self.limit_ms("chat", chat=0.5) == inf

    def test_a_plan_keeps_to_it_and_one_without_an_slo_does_not(self) -> None:
        late = Candidate("agent", 400, 0, age_ms=5000.0)
        chat = decodes(1)[0]._replace(name="chat")
        view = classed(chat, waiting_online=[late], served={"chat": 0.0, "agent": 500.0})
        assert Conserve().plan(view).tokens == {"chat": 1, "agent": 60 - 10 - 1}
        assert OnlineOnly().plan(view).tokens == {"chat": 1, "agent": 400}


class TestBounds:
    """Bounds of a request's class, and of several classes at once."""

    def test_the_tightest_of_several_has_the_smallest_of_each_bound(self) -> None:
        two = Slo(ttft_ms=200.0, tbt_ms=50.0, harm=0.3, largest_ttft_ms=1000.0, largest_tbt_ms=55.0)
        expected = Slo(ttft_ms=200.0, tbt_ms=40.0, harm=0.2, largest_ttft_ms=900.0, largest_tbt_ms=55.0)
        for slos in ([CHAT, two], [two, CHAT]):
            assert tightest(slos) == expected
        assert tightest([CHAT, Slo()]).harm == 0.2, "no promise is looser than any"
        assert tightest([]) == Slo(largest_ttft_ms=inf, largest_tbt_ms=inf), (
            "among no requests nothing is promised"
        )

    def test_a_request_has_the_bounds_of_its_class(self) -> None:
        chat, agent, other = prompt("chat"), prompt("agent"), prompt("other")
        view = classed(chat, agent, other)
        assert [view.slo_of(one) for one in (chat, agent, other)] == [CHAT, AGENT, SLOS[DEFAULT_CLASS]]
        assert view.slo_among([agent]).tbt_ms == 100
        assert view.slo_among([agent, other]).ttft_ms == 1000
        assert view_of(slo=AGENT).slo_of(chat) == view_of(slo=AGENT).slo_among([chat]) == AGENT
