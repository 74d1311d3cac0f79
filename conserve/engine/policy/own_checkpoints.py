"""A checkpoint policy of the user's own, whose answers are checked before any block is copied."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conserve.engine.policy.checkpointing import ADAPTIVE, CHECKPOINTS, CheckpointPolicy, Marked, Pressure
from conserve.engine.policy.own_class import made
from conserve.engine.policy.refusals import Refusals
from conserve.names import OFF

METHODS = {"wants_marks": "pressure", "checkpoint": "rows", "blocks_to_checkpoint": "pressure"}


class OwnCheckpoints:
    """Follows a user's checkpoint policy, and the policy `instead` beside each iteration in which that fails.

    `say` gets a sentence for each new kind of refusal.
    """

    def __init__(self, name: str, own: Any, instead: CheckpointPolicy, say: Callable[[str], None]) -> None:
        self._own, self._instead = own, instead
        sentence = f"a choice of {name} is refused ({{fault}}); {type(instead).__name__} chooses instead"
        self.refused = Refusals(sentence, say)
        self._rows: Sequence[Marked] = ()
        self._follows = True  # the user's policy has not failed beside this iteration

    def wants_marks(self, pressure: Pressure) -> bool:
        """True if the policy that is followed has anything to decide."""
        self._follows = True
        try:
            return bool(self._own.wants_marks(pressure))
        except BaseException as error:
            self._refuse(error)
        return self._instead.wants_marks(pressure)

    def checkpoint(self, rows: Sequence[Marked]) -> None:
        """Pass the rows on, as a tuple."""
        self._rows = tuple(rows)
        if self._follows:
            try:
                self._own.checkpoint(self._rows)
            except BaseException as error:
                self._refuse(error)

    def blocks_to_checkpoint(self, pressure: Pressure) -> Mapping[str, int]:
        """The user's choice if it is numbers of blocks by row, else the other policy's."""
        if self._follows:
            try:
                said: object = self._own.blocks_to_checkpoint(pressure)
                chosen = dict(said) if isinstance(said, Mapping) else said
                if (fault := fault_of_choice(chosen)) is None:
                    return chosen  # type: ignore[return-value]
                self.refused.fault(fault)
            except BaseException as error:
                self._refuse(error)
        self._instead.checkpoint(self._rows)
        return self._instead.blocks_to_checkpoint(pressure)

    def _refuse(self, error: BaseException) -> None:
        self.refused.failure(error)
        self._follows = False


def fault_of_choice(chosen: object) -> str | None:
    """The fault of a choice of blocks, for the middle of a sentence; None if it names whole numbers from 0 on.

    Rows that are not marked, and blocks beyond those that a row has to copy, are no fault: they are not copied.
    """
    if not isinstance(chosen, Mapping):
        return f"it is no mapping but of type {type(chosen).__name__}"
    for name, blocks in chosen.items():
        if not isinstance(blocks, int) or isinstance(blocks, bool) or blocks < 0:
            return f"it copies {blocks!r} blocks of {name}, and whole numbers from 0 on can be copied"
    return None


def policy_named(name: str, say: Callable[[str], None] = lambda sentence: None) -> CheckpointPolicy:
    """Make a policy from its name, or from the class path of a user's own.

    `say` gets the sentences about refused choices of a user's own. Raises ValueError with the reason if there is
    none of that name, or if it cannot be made.
    """
    if name in CHECKPOINTS:
        return CHECKPOINTS[name]()
    if "." not in name:
        known = ", ".join((*CHECKPOINTS, OFF))
        raise ValueError(
            f"there is no checkpoint policy {name!r}; there are {known}, or give package.module.Class"
        )
    return OwnCheckpoints(name, made(name, "checkpoint policy", METHODS), CHECKPOINTS[ADAPTIVE](), say)
