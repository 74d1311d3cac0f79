"""Requests that come one by one, gathered into durable jobs.

A job has all its rows when it is submitted, and an agent's next request depends on the answer to its last one.
So requests that come within a moment of each other become one job; several jobs run at once. An answer is handed
out when it is durable, before its job ends. Each request has a name that a later try of the same run gives it
again. An answer that is kept under that name is not asked for again, whichever job holds it.
"""

import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from conserve.api.job import Job
from conserve.errors import ConserveError, RequestRejected, RowsFailed
from conserve.nightly.harness.request_jobs import HarnessAnswer, Line, Queue, write_lines
from conserve.store.books.results import Result

QUIET_S = 0.2  # without a request, after which a job is made of those that came
LONGEST_S = 2.0  # that the first of them waits for others
MOST_ROWS = 10_000  # in a job
MOST_JOBS = 4  # at a time; while so many wait for answers, requests gather for a larger one
LOOK_S = 0.2  # between two looks for results; longer where a look takes long
LOOK_SHARE = 20  # of the time goes to looking, at most one part of so many


class WaitingRequest(NamedTuple):
    """A request without an answer yet."""

    line: Line
    answer: "Future[HarnessAnswer]"


class Gatherer:
    """Gathers requests into jobs of a queue; `jobs` limits the jobs that wait for answers at a time."""

    def __init__(self, asked: Queue, *, name: str, jobs: int = MOST_JOBS) -> None:
        self._queue, self._name = asked, name
        self._arrived: queue.SimpleQueue[WaitingRequest | None] = queue.SimpleQueue()
        self._kept: dict[str, HarnessAnswer] = {}  # of earlier tries
        self._number = 0
        self._places = threading.Semaphore(jobs)
        self._workers = ThreadPoolExecutor(jobs, thread_name_prefix="conserve-asking")
        self._thread: threading.Thread | None = None

    def ask(self, line: Line) -> "Future[HarnessAnswer]":
        """Answer of a request, once it is durable; the line has a name."""
        assert line.name is not None
        waiting = WaitingRequest(line, Future())
        waiting.answer.set_running_or_notify_cancel()  # a sample that ends early cancels no answer of others
        self._arrived.put(waiting)
        if self._thread is None:
            self._thread = threading.Thread(target=self._gather, name="conserve-gathering", daemon=True)
            self._thread.start()
        return waiting.answer

    def close(self) -> None:
        """Take no more requests, and wait for those that were taken."""
        if self._thread is not None:
            self._arrived.put(None)
            self._thread.join()
        self._workers.shutdown()

    def _gather(self) -> None:
        """Make jobs of the requests that come."""
        while (first := self._arrived.get()) is not None:
            self._places.acquire()
            batch, ended = self._batch(first)
            left = [waiting for waiting in batch if not self._answered_before(waiting)]
            if left:
                self._workers.submit(self._ask, left, self._number)
                self._number += 1
            else:
                self._places.release()
            if ended:
                return

    def _batch(self, first: WaitingRequest) -> tuple[list[WaitingRequest], bool]:
        """Requests that came with the first; True if no more will come."""
        batch, until = [first], time.monotonic() + LONGEST_S
        while len(batch) < MOST_ROWS and (left := until - time.monotonic()) > 0:
            try:
                waiting = self._arrived.get(timeout=min(QUIET_S, left))
            except queue.Empty:
                break
            if waiting is None:
                return batch, True
            batch.append(waiting)
        return batch, False

    def _answered_before(self, waiting: WaitingRequest) -> bool:
        """Give a request the answer that an earlier try has kept; True if there is one."""
        kept = self._kept.pop(str(waiting.line.name), None)
        if kept is not None:
            waiting.answer.set_result(kept)
        return kept is not None

    def _ask(self, batch: Sequence[WaitingRequest], number: int) -> None:
        """Ask requests as the job of this number. An earlier try's job of this number is ended first."""
        waiting = {str(one.line.name): one for one in batch}
        try:
            job = self._submit(batch, number)
            for result in results_while(job, lambda: self._queue.await_answers(job)):
                self._take(result, waiting)
        except BaseException as error:
            for one in waiting.values():
                one.answer.set_exception(error)
            waiting.clear()
        finally:
            self._places.release()
        for one in waiting.values():  # the job was an earlier try's and holds others
            self._arrived.put(one)

    def _submit(self, batch: Sequence[WaitingRequest], number: int) -> Job:
        with tempfile.TemporaryDirectory(prefix="conserve-") as folder:
            path = Path(folder, "requests.jsonl")
            write_lines(path, (waiting.line for waiting in batch))
            return self._queue.submit_once(f"{self._name}-{number}", path, order="prefix")

    def _take(self, result: Result, waiting: dict[str, WaitingRequest]) -> None:
        """Hand out a result; that of an earlier try's request is kept until the request comes."""
        name = str(result.custom_id)
        one = waiting.pop(name, None)
        if one is None:
            if not result.failed:  # else it is asked again
                self._kept[name] = answer_of(result)
        elif result.failed:
            one.answer.set_exception(failure_of(result))
        else:
            one.answer.set_result(answer_of(result))


def results_while(job: Job, work: Callable[[], None]) -> Iterator[Result]:
    """Yield each result of a job once it is durable, beside work that ends with the job; raises its error."""
    working: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            working.set_exception(error)
        else:
            working.set_result(None)

    threading.Thread(target=run, name="conserve-answering", daemon=True).start()
    with closing(job.new_results()) as looks:
        while True:
            ended, begun = working.done(), time.monotonic()
            yield from next(looks)
            if ended:
                break
            wait([working], timeout=max(LOOK_S, LOOK_SHARE * (time.monotonic() - begun)))
    working.result()


def answer_of(result: Result) -> HarnessAnswer:
    """Answer of a result."""
    return HarnessAnswer(
        text=result.text,
        finish_reason=result.finish_reason,
        logprobs=result.logprobs,
        choices=result.choices,
        prompt_tokens=result.prompt_tokens,
        completion_tokens=result.completion_tokens,
    )


def failure_of(result: Result) -> ConserveError:
    """Error of a row that failed: the request's own fault, or another."""
    said = f"{result.error_type}: {result.error}"
    if result.error_type in ("too_long", "invalid_request", "template", "invalid_messages"):
        return RequestRejected(said, kind=str(result.error_type))
    return RowsFailed(said)
