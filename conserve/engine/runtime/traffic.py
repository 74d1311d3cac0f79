"""Latencies of live requests over the last 60 s as the engine core sees them, and offline tokens beside them."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from itertools import chain
from statistics import median
from typing import Any

from conserve.engine.policy.promises import LATENCIES, Promises
from conserve.engine.policy.view import DEFAULT_CLASS, Slo, tightest
from conserve.engine.runtime.class_traffic import WINDOW_S, ClassTraffic, forget, remember, yielding
from conserve.engine.runtime.delivery_delay import Delays, ReportedDelays, names_of
from conserve.engine.runtime.histogram import added, together
from conserve.engine.runtime.last_tokens import LastTokens
from conserve.engine.runtime.live_busy import LiveBusy
from conserve.engine.runtime.pausing import RowsTime
from conserve.engine.runtime.pushing import Pushing
from conserve.engine.runtime.ranked import Moment, Ranked, quantiles
from conserve.engine.runtime.receipt import Receipt

RECENT_PROMPTS = 64  # prompts whose median is the typical prompt
RECENT_STARTS = 1000  # requests among which the ones that met a quiet iteration are counted
CREDIT = 8192.0  # cost that a busy class may be behind all others at most: about an iteration's tokens
RARE = 1 / 200  # share of them below which their waits stay out of the P99


class Pause(Enum):
    """Reason of a pause."""

    PROMISE = auto()  # rows break one
    RECEIPT = auto()  # to measure their harm


class Traffic:
    """Rolling windows over the last 60 s. Times are monotonic seconds, given by the caller."""

    def __init__(
        self,
        promises: Promises | None = None,
        receipt: Receipt | None = None,
        classes: Mapping[str, Promises] | None = None,
    ) -> None:
        """`promises` are those of the default class, `classes` those of the others by name."""
        self.receipt = receipt or Receipt(share=0.0)
        self._classes = {
            name: ClassTraffic(its)
            for name, its in {**(classes or {}), DEFAULT_CLASS: promises or Promises()}.items()
        }
        self._default = self._classes[DEFAULT_CLASS]
        self.pushing, self.rows_time, self._delays = Pushing(), RowsTime(), ReportedDelays()
        self.live_busy = LiveBusy()
        self.class_of: dict[str, str] = {}  # online request -> class, unless the default
        self._offline_tokens: deque[Moment] = deque()
        self._offline_since: float | None = None
        self._arrived_at: dict[str, float] = {}  # online requests without a token yet
        self._last_tokens = LastTokens()
        self._own_ttft: set[str] = set()  # online requests with a TTFT promise of their own
        self._peaks: deque[Moment] = deque()  # of concurrent online requests, each higher than all after it
        self._arrivals: deque[Moment] = deque()
        self._prompts: deque[int] = deque(maxlen=RECENT_PROMPTS)
        self._typical_prompt = 0
        self._starts: deque[bool] = deque(maxlen=RECENT_STARTS)  # True: met a quiet iteration
        self.rare_starts = True  # such requests are rare; as yet there was none
        self.planned_quiet = False  # the newest iteration was planned after a quiet minute, as a long one
        self._prompt_at = 0.0
        self.offline_tokens = 0

    @property
    def promises(self) -> Promises:
        """The promises of the default class."""
        return self._default.promises

    @property
    def classified(self) -> bool:
        """True if there are classes beside the default one."""
        return len(self._classes) > 1

    @property
    def served(self) -> dict[str, float]:
        """Cost of the tokens computed for each class, by which the next prompt is chosen."""
        return {name: one.served for name, one in self._classes.items()}

    def promise(self, promises: Promises) -> None:
        """Hold latencies of the default class against these promises from now on."""
        self._default.promise(promises)

    def report_delays(self, delays_ms: Mapping[str, Delays], *, server: str, now: float) -> dict[str, Any]:
        """Keep promises earlier in the engine by the delays of each class that an API server reports.

        Returns the names of what is promised, by class and latency.
        """
        self._delays.report(server, delays_ms, now=now)
        for name, one in self._classes.items():
            one.tighten_by(self._delays.longest_ms(name))
        return {name: names_of(one.promises) for name, one in self._classes.items()}

    def use_policy(self, policy: str) -> None:
        """Hold latencies of another policy from now on: what its rows make late is no fault of the ones before."""
        for one in self._classes.values():
            one.use_policy(policy)

    def pauses(self, *, offline: bool, promises: bool, now: float) -> Pause | None:
        """Why no offline token is to be computed now: for a promise, if these bind, or for the receipt.

        `offline` says if there is any offline request.
        """
        if promises and any(one.paused_for(now=now) for one in self._classes.values()):
            self.receipt.skip(now=now)
            return Pause.PROMISE
        return Pause.RECEIPT if self.receipt.pauses(offline=offline, now=now) else None

    def bounds_by_class(self) -> dict[str, Slo]:
        """Bounds on an iteration that requests of each class take part in; empty without classes."""
        return {name: one.bounds() for name, one in self._classes.items()} if self.classified else {}

    def bounds(self, *, now: float) -> Slo:
        """Bounds on the next iteration under which every promise can be kept, whichever class arrives.

        The harm is that of the classes which have a request, or had an arrival in the last 60 s: a class that none
        uses, such as the default one where all requests have another, holds nothing up. So it is with promises that
        were not kept.
        """
        if not self.classified:
            return self._default.bounds()
        seen = [one for one in self._classes.values() if one.busy or one.expected(now=now)]
        used = tightest(one.bounds() for one in seen or self._classes.values())
        return replace(
            tightest(self.bounds_by_class().values()),
            harm=used.harm,
            stand_in_ttft_harm=used.stand_in_ttft_harm,
            stand_in_tbt_harm=used.stand_in_tbt_harm,
        )

    def ttft_ms(self, live_class: str | None) -> float | None:
        """Largest TTFT in the engine that keeps a class's promises; None where there are no classes."""
        one = self._classes.get(live_class or DEFAULT_CLASS, self._default)
        return one.accountant.ttft.ceiling_ms if self.classified else None

    def typical_prompt(self, *, now: float) -> int:
        """Median number of tokens in recent online prompts; 0 after 60 s without one."""
        return self._typical_prompt if now < self._prompt_at + WINDOW_S else 0

    def arrivals_per_s(self, *, now: float) -> float:
        """Online requests per second over the last 60 s."""
        forget(self._arrivals, now=now)
        return len(self._arrivals) / WINDOW_S

    @property
    def online_now(self) -> int:
        """Number of online requests in the engine."""
        return len(self._arrived_at) + len(self._last_tokens)

    def expected(self, *, now: float) -> int:
        """Peak number of concurrent online requests in the last 60 s, minus the current number."""
        while self._peaks and self._peaks[0].at < now - WINDOW_S:
            self._peaks.popleft()
        return max(0, int(self._peaks[0].value) - self.online_now) if self._peaks else 0

    def arrived(
        self,
        request: str,
        prompt_tokens: int,
        *,
        at: float,
        live_class: str | None = None,
        own_ttft: bool = False,
    ) -> None:
        """Note an online request that has arrived; one of an unknown class is of the default one.

        With a TTFT promise of its own (`own_ttft`) it is not held against that of its class.
        """
        if own_ttft:
            self._own_ttft.add(request)
        self._starts.append(self.planned_quiet)  # all of a burst wait for that iteration's end
        self.rare_starts = sum(self._starts) <= RARE * len(self._starts)
        self._enter(request, live_class, at)
        self._arrived_at[request] = at
        self.receipt.arrived(at=at)
        while self._peaks and self._peaks[-1].value <= self.online_now:
            self._peaks.pop()  # the first one left is the peak
        self._peaks.append(Moment(at, self.online_now))
        remember(self._arrivals, Moment(at, 1.0))
        self._prompts.append(prompt_tokens)
        self._typical_prompt = int(median(self._prompts))
        self._prompt_at = at

    def tokens(self, requests: Sequence[str], *, at: float) -> None:
        """Note requests that got one or more tokens; only online ones are counted."""
        going_on, arrived_at = self._last_tokens.go_on(requests, self.class_of, at), self._arrived_at
        for request in [one for one in requests if one in arrived_at] if arrived_at else ():
            arrived = arrived_at.pop(request)
            promised = request not in self._own_ttft
            self._class(request).answered(*self._time_ms(arrived, at), at=at, promised=promised)
            self.receipt.answered(arrived=arrived, at=at)
            self._last_tokens.begin(request, at)
        for last, name, count in going_on:
            self._classes[name].tbt(*self._time_ms(last, at), count, at=at)
            self.receipt.tbt(count, last=last, at=at)

    def arrived_at(self, request: str) -> float | None:
        """Time at which an online request without a token has arrived; None for any other request."""
        return self._arrived_at.get(request)

    def answered(self, request: str) -> bool:
        """True if the online request has its first token."""
        return request in self._last_tokens

    def finished(self, request: str, *, aborted_at: float | None = None) -> None:
        """Forget a finished request; `aborted_at` is when its client left, if that is why."""
        one, promised = self._class(request), request not in self._own_ttft
        if (arrived := self._arrived_at.pop(request, None)) is not None:
            one.waiting -= 1
            if aborted_at is not None and one.given_up(
                *self._time_ms(arrived, aborted_at), at=aborted_at, promised=promised
            ):
                self.receipt.answered(arrived=arrived, at=aborted_at)
            else:
                self.receipt.gone(arrived=arrived)
        if self._last_tokens.end(request):
            one.decoding -= 1
        self.class_of.pop(request, None)
        self._own_ttft.discard(request)

    def computed(self, cost: Mapping[str, float]) -> None:
        """Note the cost of the tokens that an iteration computes for each class."""
        for name, one in cost.items():
            self._classes[name].served += one

    def offline(self, tokens: int, *, at: float) -> None:
        """Note computed tokens of offline requests."""
        self.offline_tokens += tokens
        remember(self._offline_tokens, Moment(at, tokens))
        if self._offline_since is None:
            self._offline_since = at

    def report(self, *, now: float, holds_back: bool = True) -> dict[str, Any]:
        """Report on the last 60 s, for JSON; `holds_back`: rows yield while a largest promise is not kept."""
        forget(self._offline_tokens, now=now)
        by_class = {name: one.report(now=now, holds_back=holds_back) for name, one in self._classes.items()}
        span_s = WINDOW_S if self._offline_since is None else min(WINDOW_S, now - self._offline_since)
        return {
            "online": {
                **by_class[DEFAULT_CLASS],
                **(self._together(by_class, now) if self.classified else {}),
            },
            **({"classes": self._told(by_class)} if self.classified else {}),
            "offline": {
                "tokens": self.offline_tokens,
                "tokens_per_s": sum(moment.value for moment in self._offline_tokens) / max(span_s, 1.0),
            },
        }

    def _together(self, by_class: Mapping[str, Mapping[str, Any]], now: float) -> dict[str, Any]:
        """Figures of all classes: their latencies together, and what the worst keeps."""
        ttft_ms, tbt_ms = (
            Ranked(chain.from_iterable(several))
            for several in zip(*(one.latencies(now=now) for one in self._classes.values()), strict=True)
        )
        return {
            "requests": sum(one["requests"] for one in by_class.values()),
            "ttft_ms": quantiles(ttft_ms),
            "tbt_ms": quantiles(tbt_ms),
            "attainment": min(one["attainment"] for one in by_class.values()),
            **yielding(by_class.values()),
            "counts": {name: added([one["counts"][name] for one in by_class.values()]) for name in LATENCIES},
            "histograms": {
                name: together([one["histograms"][name] for one in by_class.values()]) for name in LATENCIES
            },
        }

    def _told(self, by_class: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Figures of each class with all that is promised to it."""
        return {
            name: {"slo": one.promises.document(), **by_class[name]} for name, one in self._classes.items()
        }

    def _time_ms(self, begin: float, end: float) -> tuple[float, float]:
        """Time between two moments, and what rows took of it, in ms."""
        return (end - begin) * 1e3, self.rows_time.between(begin, end) * 1e3

    def _class(self, request: str) -> ClassTraffic:
        return self._classes[self.class_of.get(request, DEFAULT_CLASS)]

    def _enter(self, request: str, live_class: str | None, at: float) -> None:
        """Note the request's class. One that was idle starts level with the least served: it saves nothing up."""
        # One that was busy may be `CREDIT` behind: where it always has a request, it would save up without end.
        if request in self._arrived_at:
            return
        if live_class is not None and live_class != DEFAULT_CLASS and live_class in self._classes:
            self.class_of[request] = live_class
        one = self._class(request)
        others = [other for other in self._classes.values() if other.busy and other is not one]
        if not one.busy and not others:
            for idle in self._classes.values():
                idle.served = 0.0
        least = min((other.served for other in others), default=0.0)
        one.served = max(one.served, least - (CREDIT if one.busy else 0.0))
        one.waiting += 1
        one.arrived_at = at
