"""Rounds: suites ask in threads of their own, and what they wait for runs together.

A round begins once each suite waits for answers or has ended. So the rows of all suites share one queue order, and
what their prompts share is computed once.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")  # what is waited for
R = TypeVar("R")  # result of a suite

LEAVE_S = 5.0  # for a suite's thread to end with the night; one that scores is not waited for longer
Drain = Callable[[Sequence[T]], None]


class Interrupted(BaseException):
    """The night ends before its suites do."""


class Rounds(Generic[T, R]):
    """Suites that run until all have ended, round by round; `drain` runs in the caller's thread."""

    def __init__(self, drain: Drain[T]) -> None:
        self._drain = drain
        self._changed = threading.Condition()
        self._working = 0
        self._wanted: dict[int, Sequence[T]] = {}  # by thread
        self._error: BaseException | None = None

    def wait(self, *wanted: T) -> None:
        """Wait in a suite's thread until the next round has drained these."""
        me = threading.get_ident()
        with self._changed:
            self._wanted[me] = wanted
            self._changed.notify_all()
            self._changed.wait_for(lambda: me not in self._wanted or self._error is not None)
            if self._error is not None:
                raise Interrupted from self._error

    def run(self, suites: Mapping[str, Callable[[], R]], ended: Callable[[str, R | Exception], None]) -> None:
        """Run suites by name, each in its thread; `ended` is called in the caller's thread as each ends.

        An error of `drain` ends the night, and is raised.
        """
        outcomes: list[tuple[str, R | Exception]] = []
        self._working = len(suites)
        threads = [
            threading.Thread(
                target=self._suite, args=(name, work, outcomes), name=f"suite {name}", daemon=True
            )
            for name, work in suites.items()
        ]
        for thread in threads:
            thread.start()
        try:
            while self._step(outcomes, ended):
                pass
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            for thread in threads:
                thread.join(LEAVE_S)
            raise

    def _suite(self, name: str, work: Callable[[], R], outcomes: list[tuple[str, R | Exception]]) -> None:
        found: R | Exception
        try:
            found = work()
        except Interrupted:
            return
        except Exception as error:
            found = error
        except BaseException as error:  # as sys.exit in code of the user's: an error of this suite alone
            found = RuntimeError(f"it ended by {type(error).__name__}: {error}")
        with self._changed:
            outcomes.append((name, found))
            self._working -= 1
            self._changed.notify_all()

    def _step(
        self, outcomes: list[tuple[str, R | Exception]], ended: Callable[[str, R | Exception], None]
    ) -> bool:
        """Report suites that have ended, or drain what all others wait for; False once none is left."""
        with self._changed:
            self._changed.wait_for(lambda: bool(outcomes) or len(self._wanted) >= self._working)
            if not outcomes and not self._working:
                return False
            over, outcomes[:] = list(outcomes), []
            wanted = [] if over else [one for each in self._wanted.values() for one in each]
        for name, found in over:
            ended(name, found)
        if not over:
            self._drain(list(dict.fromkeys(wanted)))
            with self._changed:
                self._wanted.clear()
                self._changed.notify_all()
        return True
