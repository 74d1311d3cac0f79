"""Traces: when online requests arrive and how long they are. All transformations are pure."""

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from conserve.errors import InputError

BUNDLED = Path(str(files("conserve.bench"))) / "data"
MOST_CV = 100.0  # Azure's burstiest ten minutes have 10
STEADY_CV = 1e-6  # under it, gaps are equal
DAY_S = 86_400.0  # before the first request, at least, and
FAR = 10  # times as long as the trace: times of a calendar
LATEST_S = 10e9  # of a calendar, in the year 2286: beyond it times are not in seconds
COLUMNS = ("arrival_s", "input_tokens", "output_tokens")


class Arrival(NamedTuple):
    """A request: its due time, and the lengths of its prompt and answer."""

    at_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0  # of the prompt: those that the prefix cache has, as where a conversation goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Arrivals in order of time, at least one, all within the trace's duration.

    The first `shared_tokens` of all prompts are the same, as far as a prompt is longer than that. The
    `cached_tokens` of a prompt are the first ones of a text for all prompts: each finds its own number of them.
    """

    name: str
    duration_s: float
    arrivals: tuple[Arrival, ...]
    shared_tokens: int = 0
    on_ticks: bool = False  # its requests were at fewer times, and are spread

    def __len__(self) -> int:
        return len(self.arrivals)

    def __iter__(self) -> Iterator[Arrival]:
        return iter(self.arrivals)

    @property
    def rate(self) -> float:
        """Mean requests per second."""
        return len(self) / self.duration_s

    def scaled(self, speed: float) -> "Trace":
        """Trace with the same requests, `speed` times as fast."""
        _require_positive(speed=speed)
        return replace(
            self,
            duration_s=self.duration_s / speed,
            arrivals=tuple(arrival._replace(at_s=arrival.at_s / speed) for arrival in self),
        )

    def at_rate(self, rate: float) -> "Trace":
        """Trace with the same requests at a mean of `rate` requests per second."""
        _require_positive(rate=rate)
        return self.scaled(rate / self.rate)

    def cut(self, start_s: float, duration_s: float) -> "Trace":
        """Part of the trace from `start_s` on, for `duration_s` or to its end; its time starts at 0."""
        _require_positive(duration_s=duration_s)
        end_s = min(start_s + duration_s, self.duration_s)
        first, end = (bisect_left(self.arrivals, at_s, key=attrgetter("at_s")) for at_s in (start_s, end_s))
        kept = tuple(a._replace(at_s=a.at_s - start_s) for a in self.arrivals[first:end])
        if start_s < 0 or not kept:
            raise InputError(
                f"{self.name} has no arrival from {start_s:g} s for {duration_s:g} s; "
                f"cut from its {self.duration_s:.0f} s"
            )
        return replace(self, duration_s=end_s - start_s, arrivals=kept)

    def looped(self, start_s: float, duration_s: float) -> "Trace":
        """Part of the trace from `start_s` on, for `duration_s`; the trace begins again at its end."""
        start_s %= self.duration_s
        times = math.ceil((start_s + duration_s) / self.duration_s)
        if times == 1:
            return self.cut(start_s, duration_s)
        arrivals = tuple(
            arrival._replace(at_s=arrival.at_s + number * self.duration_s)
            for number in range(times)
            for arrival in self
        )
        return replace(self, duration_s=times * self.duration_s, arrivals=arrivals).cut(start_s, duration_s)

    def thinned(self, share: float, seed: int) -> "Trace":
        """Trace that keeps each arrival with the probability `share`: a lower rate with the same bursts."""
        _require_positive(share=share)
        kept = np.random.default_rng(seed).random(len(self.arrivals)) < share
        arrivals = tuple(arrival for arrival, keep in zip(self, kept, strict=True) if keep)
        if not arrivals:
            raise InputError(f"nothing is left of {self.name} at a share of {share:g}; give a larger one")
        return replace(self, arrivals=arrivals)

    def shortened(
        self,
        input_factor: float = 1.0,
        output_factor: float = 1.0,
        max_input: int | None = None,
        max_output: int | None = None,
    ) -> "Trace":
        """Trace with lengths multiplied, then capped; at least one token each."""
        _require_positive(input_factor=input_factor, output_factor=output_factor)
        for name, most in (("max_input", max_input), ("max_output", max_output)):
            _require_positive(**{name: 1 if most is None else most})
        shorter = tuple(
            arrival._replace(
                input_tokens=_shorten(arrival.input_tokens, input_factor, max_input),
                output_tokens=_shorten(arrival.output_tokens, output_factor, max_output),
                cached_tokens=int(arrival.cached_tokens * input_factor),
            )
            for arrival in self
        )
        return replace(self, arrivals=shorter, shared_tokens=int(self.shared_tokens * input_factor))

    def within(self, context: int) -> "Trace":
        """Trace of requests that have at most so many tokens, for which prompts are cut and not answers."""

        def cut(arrival: Arrival) -> Arrival:
            answer = min(arrival.output_tokens, context - 1)
            return arrival._replace(
                input_tokens=min(arrival.input_tokens, context - answer), output_tokens=answer
            )

        return replace(self, arrivals=tuple(map(cut, self)))

    def cached(self, arrival: Arrival) -> int:
        """Tokens of this prompt that a prefix cache holds once another one was computed."""
        return min(max(self.shared_tokens, arrival.cached_tokens), arrival.input_tokens - 1)

    def spread(self, seed: int) -> "Trace":
        """Trace that spreads every tick's requests, in their order, uniformly until the next tick.

        For traces whose publisher rounded times down to ticks. The last tick is as long as the one before it.
        """
        ticks = [(at_s, list(group)) for at_s, group in itertools.groupby(self, key=lambda a: a.at_s)]
        starts = [at_s for at_s, _ in ticks]
        last_s = starts[-1] - starts[-2] if len(starts) > 1 else self.duration_s
        ends = [*starts[1:], starts[-1] + last_s]
        rng = np.random.default_rng(seed)
        arrivals = [
            arrival._replace(at_s=float(at_s))
            for (start_s, group), end_s in zip(ticks, ends, strict=True)
            for arrival, at_s in zip(group, np.sort(rng.uniform(start_s, end_s, len(group))), strict=True)
        ]
        duration_s = max(self.duration_s, ends[-1])
        return replace(self, duration_s=duration_s, arrivals=tuple(arrivals), on_ticks=True)


def together(parts: Sequence[Trace]) -> Trace:
    """The requests of all these traces in one, each at its time."""
    arrivals = sorted(arrival for part in parts for arrival in part)
    return replace(parts[0], duration_s=max(part.duration_s for part in parts), arrivals=tuple(arrivals))


def read(path: Path, *, seed: int = 0) -> Trace:
    """Read a trace from Parquet; one whose times sit on ticks is spread. Raises `InputError`.

    Columns: arrival_s in seconds, input_tokens, output_tokens. On ticks means: two or more requests per
    distinct time on average (Mooncake's have ten). Times that begin days after 0, as those of a calendar do, count
    from the first one.
    """
    arrival_s, input_tokens, output_tokens = _columns(path)
    arrival_s = _from_start(arrival_s)
    order = np.argsort(arrival_s, kind="stable")
    arrivals = tuple(Arrival(float(arrival_s[n]), int(input_tokens[n]), int(output_tokens[n])) for n in order)
    first_s, last_s = arrivals[0].at_s, arrivals[-1].at_s
    gap_s = (last_s - first_s) / (len(arrivals) - 1) if last_s > first_s else 1.0
    trace = Trace(name=path.stem, duration_s=last_s + gap_s, arrivals=arrivals)
    on_ticks = len(arrivals) >= 2 * len(np.unique(arrival_s))
    return trace.spread(seed) if on_ticks else trace


def find_trace(name: str) -> Path:
    """Path of the file of that name, else of the bundled trace; raises `InputError`."""
    here, bundled = Path(name), BUNDLED / f"{name.removesuffix('.parquet')}.parquet"
    if here.is_file():
        return here
    if here.name == name and bundled.is_file():
        return bundled
    known = ", ".join(sorted(path.name for path in BUNDLED.glob("azure_*.parquet")))  # others have no times
    raise InputError(
        f"there is no trace {name}; name a Parquet file, or one that comes with ConServe: {known}"
    )


def gamma(
    rate: float, cv: float, duration_s: float, input_tokens: int, output_tokens: int, seed: int
) -> Trace:
    """Arrivals with Gamma distributed gaps: `cv` 1 is Poisson, more is burstier, 0 is a metronome.

    They begin long before the first second, so that each has as many as the rate says.
    """
    at_s = _gamma_times(rate, cv, duration_s, seed)
    name = f"gamma rate {rate:g} cv {cv:g} seed {seed}"
    return _uniform(name, duration_s, at_s, input_tokens, output_tokens)


def on_off(
    rate: float,
    on_s: float,
    off_s: float,
    duration_s: float,
    input_tokens: int,
    output_tokens: int,
    seed: int,
    cv: float = 1.0,
) -> Trace:
    """Arrivals at `rate` per second for `on_s` s, none for `off_s` s, and so on; the gaps are Gamma distributed."""
    _require_positive(on_s=on_s, duration_s=duration_s)
    if off_s < 0:
        raise InputError(f"off_s is {off_s:g}; give zero or more seconds")
    cycles, rest_s = divmod(duration_s, on_s + off_s)
    busy_s = _gamma_times(rate, cv, cycles * on_s + min(rest_s, on_s), seed)
    name = f"on/off rate {rate:g} on {on_s:g} s off {off_s:g} s seed {seed}"
    at_s = np.minimum(busy_s + busy_s // on_s * off_s, np.nextafter(duration_s, 0))
    return _uniform(name, duration_s, at_s, input_tokens, output_tokens)


def _gamma_times(rate: float, cv: float, duration_s: float, seed: int) -> np.ndarray[Any, Any]:
    """Arrival times before `duration_s` of a process that is in equilibrium at 0."""
    _require_positive(rate=rate, duration_s=duration_s)
    if not 0 <= cv <= MOST_CV:
        raise InputError(f"cv is {cv:g}; give 0 to {MOST_CV:g}, 1 for Poisson arrivals")
    rng = np.random.default_rng(seed)
    shape = 1 / cv**2 if cv > STEADY_CV else inf
    # The gap around 0 is as likely as it is long, so of the shape above; 0 is anywhere in it.
    around_s = rng.gamma(shape + 1, 1 / (rate * shape)) if shape < inf else 1 / rate
    at_s = np.array([around_s * rng.random()])
    while at_s[-1] < duration_s:
        number = math.ceil(rate * duration_s) + 16
        gaps_s = rng.gamma(shape, 1 / (rate * shape), number) if shape < inf else np.full(number, 1 / rate)
        at_s = np.concatenate([at_s, at_s[-1] + np.cumsum(gaps_s)])
    return at_s[at_s < duration_s]


def _uniform(
    name: str, duration_s: float, at_s: np.ndarray[Any, Any], input_tokens: int, output_tokens: int
) -> Trace:
    """A trace of equally long requests."""
    _require_positive(input_tokens=input_tokens, output_tokens=output_tokens)
    if not len(at_s):
        raise InputError(
            f"no request arrives within {duration_s:g} s ({name}); ask for more seconds or a higher rate"
        )
    arrivals = tuple(Arrival(float(t), input_tokens, output_tokens) for t in at_s)
    return Trace(name=name, duration_s=duration_s, arrivals=arrivals)


def _columns(path: Path) -> list[np.ndarray[Any, Any]]:
    """Read and check the file's three columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            missing = [name for name in COLUMNS if name not in file.schema_arrow.names]
            table = file.read(columns=list(COLUMNS))
        if missing:
            raise InputError(
                f"{path} lacks {', '.join(missing)}; a trace has the columns {', '.join(COLUMNS)}"
            )
        arrival_s, *tokens = [table[name].cast(pa.float64()).to_numpy() for name in COLUMNS]
    except FileNotFoundError as error:
        raise InputError(f"there is no trace {path}; name a Parquet file") from error
    except (OSError, pa.ArrowException) as error:
        why = str(error).splitlines()[0]
        raise InputError(
            f"{path} cannot be read as a trace ({why}); give a Parquet file of numbers"
        ) from error
    if not len(arrival_s):
        raise InputError(f"{path} holds no request; give a trace with at least one")
    if not np.all(np.isfinite(arrival_s)) or arrival_s.min() < 0:
        raise InputError(
            f"{path} has missing or negative times; arrival_s must count seconds from the trace's start"
        )
    if arrival_s.max() > LATEST_S:
        raise InputError(
            f"{path} has times up to {arrival_s.max():.3g}; arrival_s is in seconds, so divide milliseconds by 1000"
        )
    for name, counts in zip(COLUMNS[1:], tokens, strict=True):
        if not np.all(counts >= 1):
            raise InputError(f"{path} has {name} below 1; drop those requests")
    return [arrival_s, *tokens]


def _from_start(arrival_s: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """These times, from the first one on if the time before it is far longer than all of them take."""
    first_s = arrival_s.min()
    late = first_s > max(DAY_S, FAR * (arrival_s.max() - first_s))
    return arrival_s - first_s if late else arrival_s


def _shorten(tokens: int, factor: float, most: int | None) -> int:
    shorter = max(1, round(tokens * factor))
    return shorter if most is None else min(shorter, most)


def _require_positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{name} is {value:g}; give a number above zero")
