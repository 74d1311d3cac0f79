"""Waiting for jobs that a server answers beside its live requests, and what these notice of it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from conserve.api.job import Job
from conserve.api.servers import Unreported, ask
from conserve.config import Settings
from conserve.evals.records import LiveLatencies
from conserve.jobs.harvest.services import running
from conserve.store.books.states import JobState

if TYPE_CHECKING:
    from conserve.server_report import RatioReport, SchedulerReport

LOOK_S = 30.0
ANSWER_S = 5.0


def await_served(
    job: Job, settings: Settings, live_latencies: LiveLatencies | None, say: Callable[[str], None]
) -> LiveLatencies | None:
    """Wait until a job that a server answers has ended, however it ends; says once that it is paused.

    Returns the live latencies that were seen meanwhile, with those of before.
    """
    told = False
    while True:
        try:
            ended = job.wait(timeout_s=LOOK_S).final
        except TimeoutError:
            ended = False
        for said in answers(settings):
            live_latencies = worst(live_latencies, said)
        if ended:
            return live_latencies
        if not told and job.status is JobState.PAUSED:
            say(f"job {job.id} is paused, and is waited for; let it go on with: conserve resume {job.id}")
            told = True


def answers(settings: Settings) -> "list[SchedulerReport]":
    """Answers of the store's servers to `GET /v1/conserve`; of those that answer."""
    found = [ask(server.url, settings, seconds=ANSWER_S) for server in running(settings)]
    return [said for said in found if not isinstance(said, Unreported)]


def worst(known: LiveLatencies | None, said: "SchedulerReport") -> LiveLatencies:
    """The larger of the latencies known and those of a server's last minute; likewise the ratios."""
    before = known or LiveLatencies()
    online, receipt = said.online, said.harm
    return LiveLatencies(
        ttft_p99_ms=larger(before.ttft_p99_ms, online.ttft_ms.p99),
        tbt_p99_ms=larger(before.tbt_p99_ms, online.tbt_ms.p99),
        ttft_p99_ratio=larger(before.ttft_p99_ratio, ratio(receipt.ttft_ms.p99)),
        tbt_p99_ratio=larger(before.tbt_p99_ratio, ratio(receipt.tbt_ms.p99)),
    )


def ratio(measured: "RatioReport | None") -> float | None:
    """Latency with rows over that in their pauses; None where it was not measured yet."""
    return None if measured is None else measured.ratio


def larger(one: float | None, other: float | None) -> float | None:
    """The larger of two figures; None if neither is known."""
    known = [value for value in (one, other) if value is not None]
    return max(known, default=None)
