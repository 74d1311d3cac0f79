"""A checkpoint policy of the user's own: followed where its answers are numbers of blocks, replaced elsewhere."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from conserve.engine.policy.checkpointing import Adaptive, CheckpointPolicy, Eager, Marked, Pressure
from conserve.engine.policy.own_checkpoints import OwnCheckpoints, policy_named
from conserve.engine.policy.refusals import refusals_of

EXAMPLES = Path(__file__).parents[2] / "examples"
ROWS = [Marked("first", 3), Marked("second", 9), Marked("live", 20, online=True)]
SHORT = Pressure(total=100, free=20, host_room=50, budget=10)


class Choosing:
    """A user's policy whose methods answer what they are given."""

    def __init__(
        self, chosen: Any = None, *, wants: Any = lambda: True, takes: Callable[..., Any] = lambda rows: None
    ) -> None:
        self.chosen, self.wants, self.takes = chosen, wants, takes

    def wants_marks(self, pressure: Pressure) -> Any:
        return self.wants()

    def checkpoint(self, rows: Any) -> None:
        self.takes(rows)

    def blocks_to_checkpoint(self, pressure: Pressure) -> Any:
        return self.chosen() if callable(self.chosen) else self.chosen


def failing(*args: Any) -> Any:
    raise ZeroDivisionError("it cannot divide")


def leaving(*args: Any) -> Any:
    raise SystemExit("it leaves")


def chosen_by(policy: CheckpointPolicy, pressure: Pressure = SHORT) -> Mapping[str, int] | None:
    """Ask the policy as the engine does; None if it wants no rows."""
    if not policy.wants_marks(pressure):
        return None
    policy.checkpoint(list(ROWS))
    return policy.blocks_to_checkpoint(pressure)


def own(theirs: Any, say: Callable[[str], None] = lambda sentence: None) -> OwnCheckpoints:
    return OwnCheckpoints("mine.Policy", theirs, Eager(), say)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (None, "it is no mapping but of type NoneType"),
        (["first"], "it is no mapping but of type list"),
        ({"first": 2.5}, "it copies 2.5 blocks of first, and whole numbers from 0 on can be copied"),
        ({"first": -1}, "it copies -1 blocks of first, and whole numbers from 0 on can be copied"),
        ({"first": "x"}, "it copies 'x' blocks of first, and whole numbers from 0 on can be copied"),
        ({"first": True}, "it copies True blocks of first, and whole numbers from 0 on can be copied"),
        ({"second": 1, "first": None}, "it copies None blocks of first, and whole numbers from 0 on can be copied"),
        (failing, "it failed with ZeroDivisionError: it cannot divide"),
        (leaving, "it failed with SystemExit: it leaves"),
    ],
)  # fmt: skip
def test_a_choice_that_cannot_be_is_refused_and_the_built_in_policy_chooses(answer: Any, fault: str) -> None:
    said: list[str] = []
    policy = own(Choosing(answer), said.append)
    for _ in range(3):
        assert chosen_by(policy) == chosen_by(Eager())
    assert refusals_of(policy) == {"count": 3, "reasons": [fault]}
    assert said == [f"a choice of mine.Policy is refused ({fault}); Eager chooses instead"]


@pytest.mark.parametrize(
    "broken",
    [
        {"wants": failing},
        {"wants": failing, "takes": failing},
        {"takes": failing},
        {"takes": leaving},
        {"takes": list.clear},
    ],
)
def test_whichever_method_fails_the_built_in_policy_chooses_beside_that_iteration(
    broken: dict[str, Any],
) -> None:
    theirs = Choosing({"second": 4}, **broken)
    policy = own(theirs)
    assert chosen_by(policy) == chosen_by(Eager())
    assert policy.refused.count == 1, "its other methods are not asked beside the same iteration"
    sound = Choosing()
    theirs.wants, theirs.takes = sound.wants, sound.takes
    assert chosen_by(policy) == {"second": 4}
    assert policy.refused.count == 1


def test_what_a_policy_wants_is_true_or_false_as_python_sees_it() -> None:
    for wanted, asked in ((1, True), ([], False), (None, False)):
        assert (chosen_by(own(Choosing({"first": 1}, wants=lambda one=wanted: one))) is not None) == asked


def test_a_choice_is_followed_as_it_was_when_it_was_made() -> None:
    kept = Counter({"second": 2, "first": 0})
    policy = own(Choosing(kept))
    found = chosen_by(policy)
    kept["second"] = -5
    assert found == {"second": 2, "first": 0}
    assert list(found) == ["second", "first"]


class Fine(Choosing): ...


def test_a_policy_of_ones_own_is_followed_and_adaptive_takes_its_place() -> None:
    policy: Any = policy_named(f"{__name__}.Fine")
    assert chosen_by(policy) == chosen_by(Adaptive()) != {}, "it answers None"
    assert policy.refused.count == 1
    policy = policy_named(f"{__name__}.{Taking.__name__}")
    assert chosen_by(policy) == {"live": 7}
    assert not policy.refused.count


class WithoutMethods:
    checkpoint = 3


def test_a_policy_that_cannot_be_made_is_refused_in_words() -> None:
    for path, why in (
        ("nowhere.Mine", r"the checkpoint policy nowhere\.Mine cannot be made \(ModuleNotFoundError"),
        (
            f"{__name__}.WithoutMethods",
            r"the checkpoint policy \S+ has no method wants_marks\(pressure\) and no method "
            r"checkpoint\(rows\) and no method blocks_to_checkpoint\(pressure\); define it",
        ),
        ("often", r"there is no checkpoint policy 'often'; there are "),
    ):
        with pytest.raises(ValueError, match=f"^{why}"):
            policy_named(path)


class Taking:
    """Copies seven blocks of the last row."""

    def wants_marks(self, pressure: Pressure) -> bool:
        return True

    def checkpoint(self, rows: Sequence[Marked]) -> None:
        self.last = rows[-1].name

    def blocks_to_checkpoint(self, pressure: Pressure) -> dict[str, int]:
        return {self.last: 7}


def test_the_example_copies_the_longest_rows_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    longest = policy_named("longest_checkpoints.Longest", pytest.fail)
    assert chosen_by(longest) == {"second": 9, "first": 1}
    assert chosen_by(longest, SHORT._replace(budget=14)) == {"second": 9, "first": 3, "live": 2}
    assert chosen_by(longest, SHORT._replace(free=60)) is None
    assert chosen_by(longest, SHORT._replace(budget=0)) is None


def test_rows_may_be_told_before_the_first_question() -> None:
    told: list[Any] = []
    policy = Choosing(takes=told.append)
    own(policy).checkpoint(list(ROWS))
    assert told == [tuple(ROWS)]
