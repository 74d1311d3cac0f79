"""The queue and its servers at one moment: what `conserve top` shows."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from conserve.api.servers import ASKED_AT_ONCE, Unreported, addresses, ask
from conserve.config import Settings
from conserve.errors import ConserveError
from conserve.jobs.deadlines.forecast import Forecast
from conserve.jobs.deadlines.queue import forecast_queue
from conserve.jobs.deadlines.work import computed_tokens
from conserve.store.books.readings import JobReading, read_harvested, read_jobs
from conserve.store.books.slots import SLOT_S, HarvestedQuarter
from conserve.store.books.states import GOING

if TYPE_CHECKING:
    from conserve.server_report import PromiseReport, Quantiles, SchedulerReport

P99 = "p99"  # the promise of a time without a name
LOOK_S = 1.0
FORECAST_S = 15.0  # between two forecasts, which take longer than all else
COURSES = 60
KEPT = 64  # samples of a rate: a line of the screen
SMOOTH_S = 10.0  # results come in batches
QUARTERS = 24  # of an hour: six hours
Asking = Callable[[str, Settings], "SchedulerReport | Unreported"]


class Sample(NamedTuple):
    """A counter at a moment."""

    at: float
    tokens: float


class CounterRate:
    """Rate of a counter over the last seconds, and its course. One that falls was begun anew."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()
        self.course: deque[float] = deque(maxlen=KEPT)

    @property
    def now(self) -> float | None:
        """Tokens/s; None before there are two samples."""
        return self.course[-1] if self.course else None

    def add(self, at: float, tokens: float) -> None:
        """Add a sample."""
        if self._samples and (tokens < self._samples[-1].tokens or at <= self._samples[-1].at):
            self._samples.clear()
        self._samples.append(Sample(at, tokens))
        while len(self._samples) > 2 and self._samples[1].at <= at - SMOOTH_S:
            self._samples.popleft()
        first, last = self._samples[0], self._samples[-1]
        if last.at > first.at:
            self.course.append((last.tokens - first.tokens) / (last.at - first.at))


class Latency(NamedTuple):
    """A latency of live requests over the last minute beside one of its promises, in ms; None without one."""

    p99: float | None = None
    promised: float | None = None
    promise: str = P99
    """Name of the quantile that is promised, or of the mean."""
    seen: float | None = None
    """Value of that quantile or mean, from a server that tells it."""

    @classmethod
    def of(cls, latency: "Quantiles", promises: "Mapping[str, PromiseReport]") -> Self:
        """Latency beside a promise that is broken, else that of the P99, else the last one."""
        if not promises:
            return cls(latency.p99)
        broken = [name for name, one in promises.items() if not one.kept]
        name = (broken or [name for name in (P99,) if name in promises] or list(promises))[-1]
        return cls(latency.p99, promises[name].promised_ms, name, promises[name].seen_ms)

    @property
    def value(self) -> float | None:
        """Latency that is held against the promise."""
        return self.p99 if self.promise == P99 and self.seen is None else self.seen

    @property
    def kept(self) -> bool:
        """False if the promise is broken."""
        return self.value is None or self.promised is None or self.value <= self.promised

    def document(self) -> dict[str, Any]:
        """JSON of the latency (docs/reference/json.md)."""
        promised = (
            {} if self.promised is None else {"promise": self.promise, "seen": self.value, "kept": self.kept}
        )
        return {"p99": self.p99, "promised": self.promised, **promised}


UNKNOWN = Latency()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSeen:
    """One server. With an `error` or as a `stock` server it has no figures."""

    url: str
    error: str | None = None
    stock: bool = False
    policy: str | None = None
    age_s: float | None = None  # of the figures; None if they are of now
    ttft_ms: Latency = UNKNOWN
    tbt_ms: Latency = UNKNOWN
    attainment: float | None = None
    harm: float | None = None  # largest that is promised, to a latency without an SLO
    tokens_per_s: float = 0.0  # offline, over the last minute
    course: Sequence[float] = ()  # of offline tokens/s
    iterations_left: int = 0
    tokens_redone: int = 0
    tokens_restored: int = 0
    tokens_recomputed: int = 0

    def document(self) -> dict[str, Any]:
        """JSON of the server (docs/reference/json.md)."""
        if self.error is not None or self.stock:
            return {"url": self.url, "error": self.error, "stock": self.stock}
        named = ("url", "policy", "age_s", "attainment", "harm", "iterations_left", "tokens_redone")
        evicted = ("tokens_restored", "tokens_recomputed")
        return {
            **{name: getattr(self, name) for name in (*named, *evicted)},
            "ttft_ms": self.ttft_ms.document(),
            "tbt_ms": self.tbt_ms.document(),
            "offline_tokens_per_s": round(self.tokens_per_s, 1),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Jobs and servers at one moment. `error` says why the store cannot be read; the jobs are then older.

    Without `read` the store was never read, so that nothing is known of jobs.
    """

    at: float
    store: str
    jobs: Sequence[JobReading] = ()
    servers: Sequence[ServerSeen] = ()
    forecasts: Mapping[str, Forecast] = field(default_factory=dict)
    tokens_per_s: float | None = None
    course: Sequence[float] = ()
    quarters: Sequence[float] = ()  # tokens/s of the last quarters of an hour, idle time included
    error: str | None = None
    read: bool = True

    @property
    def rows_left(self) -> int:
        """Rows without a result, of jobs that may run."""
        return sum(job.unanswered for job in self.jobs if job.state in GOING)


def server_seen(url: str, said: "SchedulerReport | Unreported", course: Sequence[float] = ()) -> ServerSeen:
    """A server by its answer."""
    if isinstance(said, Unreported):
        return ServerSeen(url=url, error=said.error, stock=said.error is None)
    from conserve.engine.policy.policies import kept_promises

    online, slo = said.online, kept_promises(said.slo, said.policy)
    return ServerSeen(
        url=url,
        policy=said.policy,
        age_s=said.age_s,
        ttft_ms=Latency.of(online.ttft_ms, online.promises.ttft_ms),
        tbt_ms=Latency.of(online.tbt_ms, online.promises.tbt_ms),
        attainment=online.attainment,
        harm=slo.harm or slo.default_harm,
        tokens_per_s=said.offline.tokens_per_s,
        course=course,
        iterations_left=said.preemption.iterations_left,
        tokens_redone=said.preemption.tokens_redone,
        tokens_restored=said.checkpoint.tokens_restored,
        tokens_recomputed=said.checkpoint.tokens_recomputed,
    )


class StoreWatch:
    """Looks at the store and the servers again and again; a server that is slow holds nothing up."""

    def __init__(
        self,
        settings: Settings,
        endpoints: Sequence[str] = (),
        *,
        asking: Asking = ask,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings, self._endpoints, self._asking, self._clock = settings, endpoints, asking, clock
        self._pool = ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="server")
        self._questions: dict[str, Future[SchedulerReport | Unreported]] = {}
        self._answers: dict[str, SchedulerReport | Unreported] = {}
        self._paces: dict[str, CounterRate] = {}
        self._pace = CounterRate()
        self._course: deque[float] = deque(maxlen=KEPT)
        self._jobs: Sequence[JobReading] = ()
        self._was_read = False
        self._forecasts: Mapping[str, Forecast] = {}
        self._quarters: Sequence[float] = ()
        self._forecast_at: float | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """End the threads; a question under way is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def look(self, *, wait_s: float = 0.0) -> Overview:
        """Look once; `wait_s` is the time that servers have to answer, beside which older answers are shown."""
        with self._lock:
            now = self._clock()
            named = addresses(self._settings, self._endpoints)
            self._ask(named)
            urls = list(named)
            error = self._read(now)
            self._take_answers(urls, now, wait_s)
            return Overview(
                at=now,
                store=self._settings.place,
                jobs=self._jobs,
                servers=[self._server(url) for url in urls],
                forecasts=self._forecasts,
                tokens_per_s=self._rate(urls),
                course=tuple(self._course),
                quarters=self._quarters,
                error=error,
                read=self._was_read,
            )

    def _ask(self, named: Mapping[str, str]) -> None:
        for url, address in named.items():
            if url not in self._questions:
                self._questions[url] = self._pool.submit(self._asking, address, self._settings)

    def _take_answers(self, urls: Sequence[str], now: float, wait_s: float) -> None:
        """Take the answers that have come; the next look asks these servers again."""
        until = time.monotonic() + wait_s
        for url in urls:
            question = self._questions[url]
            try:
                said = question.result(max(0.0, until - time.monotonic()))
            except TimeoutError:
                continue
            del self._questions[url]
            self._answers[url] = said
            if not isinstance(said, Unreported):
                self._paces.setdefault(url, CounterRate()).add(now, said.offline.tokens)

    def _rate(self, urls: Sequence[str]) -> float | None:
        """Rate of the queue: what became durable, or what servers say that they computed, if that is more."""
        # Long rows become durable long after their tokens were computed; `conserve run` is no server.
        served = sum(pace.now or 0.0 for url, pace in self._paces.items() if url in urls)
        if self._pace.now is not None:
            self._course.append(max(self._pace.now, served))
            return self._course[-1]
        said = sum(self._server(url).tokens_per_s for url in urls)
        return max(recent(self._quarters) or 0.0, said) or None

    def _server(self, url: str) -> ServerSeen:
        if url not in self._answers:
            return ServerSeen(url=url, error="is being asked")
        pace = self._paces.get(url)
        return server_seen(url, self._answers[url], tuple(pace.course) if pace else ())

    def _read(self, now: float) -> str | None:
        """Read the store; returns why it cannot be read."""
        try:
            self._jobs, self._was_read = read_jobs(self._settings, now=now), True
            self._pace.add(now, sum(computed_tokens(job, job.resumed_tokens) for job in self._jobs))
            if self._forecast_at is None or not 0 <= now - self._forecast_at < FORECAST_S:
                self._forecast(now)
        except ConserveError as error:
            return str(error)
        return None

    def _forecast(self, now: float) -> None:
        slots = read_harvested(self._settings)
        self._forecast_at, self._quarters = now, quarters(slots, now)
        waiting = any(job.state in GOING and job.unanswered for job in self._jobs)
        self._forecasts = forecast_queue(self._jobs, slots, now=now, courses=COURSES) if waiting else {}


def quarters(slots: Sequence[HarvestedQuarter], now: float) -> list[float]:
    """Tokens/s of the last quarters of an hour, the present one by its time so far."""
    tokens, last = {slot: tokens for slot, tokens, _ in slots}, int(now // SLOT_S)
    past = [tokens.get(slot, 0.0) / SLOT_S for slot in range(last - QUARTERS + 1, last)]
    return [*past, tokens.get(last, 0.0) / max(1.0, now - last * SLOT_S)]


def recent(course: Sequence[float]) -> float | None:
    """Rate of the present quarter of an hour; None if none was seen."""
    return course[-1] if any(course) else None
