"""Points that are measured in several processes at once, each told as soon as it is done."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from conserve.engine.runtime.parent_death import follow_parent
from conserve.errors import ConserveError

Point = TypeVar("Point")
Found = TypeVar("Found")


def side_by_side(
    points: Sequence[Point], make: Callable[[], Callable[[Point], Found]], processes: int
) -> Generator[tuple[Point, Found]]:
    """Yield each point with what was found there, in the order in which they are done.

    `make` returns what measures a point. It is called once in each process, and has to be picklable for more than
    one. A process computes in one thread. Closing the iterator ends the processes and drops the points under way.
    Raises `ConserveError` if a process is killed, and what measuring raises.
    """
    if processes == 1:
        measure = make()
        for point in points:
            yield point, measure(point)
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        processes,
        multiprocessing.get_context("spawn"),
        initializer=_Measuring.begin,
        initargs=(make, os.getpid()),
    )
    try:
        with _interrupts_ignored():
            points_of: dict[Future[Found], Point] = {
                pool.submit(_Measuring.one, point): point for point in points
            }
        for done in as_completed(points_of):
            yield points_of[done], done.result()
    except BrokenProcessPool as error:
        raise ConserveError(
            "a process that measured was killed, perhaps for its memory; "
            "the same command with --processes 1 goes on"
        ) from error
    finally:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Let processes that start here ignore Ctrl-C, which a terminal sends to all and this process handles."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Measuring:
    """Measures points in a process of the pool."""

    make: Callable[[], Callable[[Any], Any]]
    measure: Callable[[Any], Any] | None = None

    @classmethod
    def begin(cls, make: Callable[[], Callable[[Any], Any]], parent: int) -> None:
        """Begin the process."""
        follow_parent(signal.SIGKILL, parent)
        os.environ["OMP_NUM_THREADS"] = "1"
        cls.make = staticmethod(make)

    @classmethod
    def one(cls, point: Any) -> Any:
        """Measure a point. What fails to be made is the first point's failure, which the pool hands on."""
        if cls.measure is None:
            cls.measure = staticmethod(cls.make())
        return cls.measure(point)
