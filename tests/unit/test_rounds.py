"""Rounds: what all suites wait for runs together, and an error ends the night."""

from collections.abc import Sequence

import pytest

from conserve.nightly.rounds import Rounds


def test_all_suites_ask_before_the_first_is_answered() -> None:
    drained: list[list[str]] = []
    rounds: Rounds[str, str] = Rounds(lambda wanted: drained.append(sorted(wanted)))
    ended: dict[str, object] = {}

    def once() -> str:
        rounds.wait("a", "b")
        return "once"

    def twice() -> str:
        rounds.wait("c")
        rounds.wait("d")
        return "twice"

    suites = {"once": once, "twice": twice, "never": lambda: "never"}
    rounds.run(suites, lambda name, found: ended.setdefault(name, found))
    assert drained == [["a", "b", "c"], ["d"]]
    assert ended == {"once": "once", "twice": "twice", "never": "never"}


def test_an_error_of_a_suite_ends_that_suite_alone() -> None:
    rounds: Rounds[str, str] = Rounds(lambda wanted: None)
    ended: dict[str, object] = {}

    def fails() -> str:
        raise ValueError("no")

    def asks() -> str:
        rounds.wait("a")
        return "fine"

    rounds.run({"fails": fails, "asks": asks}, lambda name, found: ended.setdefault(name, found))
    assert isinstance(ended["fails"], ValueError)
    assert ended["asks"] == "fine"


def test_an_engine_that_fails_ends_the_night() -> None:
    def drain(wanted: Sequence[str]) -> None:
        raise OSError("no engine")

    rounds: Rounds[str, None] = Rounds(drain)
    ended: list[str] = []
    with pytest.raises(OSError, match="no engine"):
        rounds.run({"asks": lambda: rounds.wait("a")}, lambda name, found: ended.append(name))
    assert not ended
