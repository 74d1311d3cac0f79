"""Operating points of a sweep: how busy, how bursty, how long requests are, how tight the SLO is. Pure.

A cell is a rate (by how busy online-only alone keeps the engine), a burstiness, the lengths of live requests, and a
scale of the SLO, which is that many times online-only's P99s. Bundled traces bring bursts and lengths of their own.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Self

from conserve.bench import traces
from conserve.bench.simulate_online import EngineModel, play
from conserve.bench.traces import Trace
from conserve.errors import InputError, SettingsError
from conserve.profiles.batch import Batch, Slice


class Lengths(NamedTuple):
    """Tokens of live requests."""

    prompt: int
    answer: int
    shared: int = 0  # first tokens of the prompts, the same in all


BUSY = (0.2, 0.4, 0.6, 0.8)  # share of the time, by online-only alone
CVS = (0.5, 1.0, 2.0, 4.0)  # of the gaps between arrivals
LENGTHS: Mapping[str, Lengths] = {
    "chat": Lengths(128, 48),
    "code": Lengths(256, 16),
    "documents": Lengths(900, 32),
    "agents": Lengths(600, 96, 384),
}
TRACES: Mapping[str, str] = {
    "trace-code": "azure_code_2023_10min_bursty",
    "trace-chat": "azure_conv_2023_10min",
}
SCALES = (1.0, 1.25, 1.5)  # times online-only's P99s
TRACE_PROMPTS, TRACE_ANSWERS = 0.125, 0.25  # times the recorded lengths, as long as the others here are
LONGEST_PROMPT = 1024  # tokens of a trace's prompt
POINTS = 4096  # tried for an even spread before the rest follows in order
STEPS = 10  # of the bisection for a rate
DRAWS = 50  # of a thinned trace that is empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """An operating point."""

    busy: float
    cv: float | None  # None for a trace
    lengths: str  # of `LENGTHS`, or of `TRACES`
    scale: float

    @property
    def name(self) -> str:
        """Words for tables."""
        bursts = "" if self.cv is None else f"CV {self.cv:g}, "
        return f"{self.lengths}, {self.busy:.0%} busy, {bursts}SLO x{self.scale:g}"

    def document(self) -> dict[str, Any]:
        """The cell for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Self:
        """Read what `document` has written."""
        return cls(**{name: said[name] for name in cls.__dataclass_fields__})


def grid() -> list[Cell]:
    """All cells."""
    kinds = [*itertools.product(LENGTHS, CVS), *((name, None) for name in TRACES)]
    return [
        Cell(busy=busy, cv=cv, lengths=lengths, scale=scale)
        for (lengths, cv), busy, scale in itertools.product(kinds, BUSY, SCALES)
    ]


def named(name: str) -> Cell:
    """The cell of this name, however it is spaced and spelled; raises `SettingsError`."""
    wanted = _spelled(name)
    for cell in grid():
        if _spelled(cell.name) == wanted:
            return cell
    raise SettingsError(
        f"there is no operating point {name!r}; name one as the tables of a sweep do, such as {grid()[0].name!r}"
    )


def _spelled(name: str) -> str:
    return "".join(name.split()).lower()


def spread(seed: int) -> Iterator[Cell]:
    """All cells, each once, in an order of which every beginning fills the grid evenly.

    The order follows a scrambled Sobol sequence (Sobol', "On the distribution of points in a cube", 1967).
    """
    from scipy.stats import qmc

    points = qmc.Sobol(d=4, scramble=True, rng=seed).random(POINTS).tolist()
    return iter(dict.fromkeys([*(_at(*point) for point in points), *grid()]))


def _at(busy: float, kind: float, cv: float, scale: float) -> Cell:
    """Cell at a point of the unit cube; each trace has the share of one burstiness of one length."""
    places = kind * (len(LENGTHS) + len(TRACES) / len(CVS))
    if places < len(LENGTHS):
        lengths, bursts = _pick([*LENGTHS], places / len(LENGTHS)), _pick(CVS, cv)
    else:
        lengths, bursts = _pick([*TRACES], cv), None
    return Cell(busy=_pick(BUSY, busy), cv=bursts, lengths=lengths, scale=_pick(SCALES, scale))


def _pick(values: Any, at: float) -> Any:
    return values[int(at * len(values))]


Arrivals = Callable[[int], Trace]
"""Arrivals of a block, by its number."""


def arrivals(cell: Cell, rate: float, block_s: float, *, times: float = 1.0, seed: int = 0) -> Arrivals:
    """Arrivals at this rate, with lengths so many `times` the usual ones."""
    if cell.lengths in TRACES:
        whole = traces.read(traces.find_trace(TRACES[cell.lengths]))
        return lambda number: _of_trace(whole, rate, block_s, times, seed + number)
    lengths = LENGTHS[cell.lengths]
    prompt, answer, shared = (round(tokens * times) for tokens in lengths)

    def of_gamma(number: int) -> Trace:
        for draw in range(DRAWS):
            try:
                drawn = traces.gamma(
                    rate, cell.cv or 0.0, block_s, prompt, answer, seed + number + 1000 * draw
                )
            except InputError:  # a burst may begin behind the block
                continue
            return replace(drawn, shared_tokens=shared)
        raise InputError(
            f"no request arrives within {block_s:g} s at {rate:.3g} requests/s; play longer blocks"
        )

    return of_gamma


def _of_trace(whole: Trace, rate: float, block_s: float, times: float, seed: int) -> Trace:
    """The whole trace within a block, thinned to this rate."""
    share = min(1.0, rate * block_s / len(whole))
    for draw in range(DRAWS):
        try:
            thinned = whole.thinned(share, seed + 1000 * draw)
        except InputError:
            continue
        return thinned.scaled(whole.duration_s / block_s).shortened(
            TRACE_PROMPTS * times, TRACE_ANSWERS * times, max_input=round(LONGEST_PROMPT * times)
        )
    raise InputError(f"nothing is left of {whole.name} at {rate:.3g} requests/s; play longer blocks")


@lru_cache(maxsize=256)
def _rate(lengths: str, busy: float, engine: EngineModel, block_s: float, times: float, seed: int) -> float:
    """The rate, which cells that differ in CV and scale share."""
    steady = Cell(busy=busy, cv=None if lengths in TRACES else 1.0, lengths=lengths, scale=1.0)
    low, high = _bracket(steady, engine, block_s, times, seed)
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        low, high = (
            (middle, high) if _busy(steady, middle, engine, block_s, times, seed) < busy else (low, middle)
        )
    return low


def rate_of(cell: Cell, engine: EngineModel, block_s: float, *, times: float = 1.0, seed: int = 0) -> float:
    """Requests per second at which online-only alone keeps the engine so busy, as a Poisson process."""
    return _rate(cell.lengths, cell.busy, engine, block_s, times, seed)


def _bracket(cell: Cell, engine: EngineModel, block_s: float, times: float, seed: int) -> tuple[float, float]:
    """Rates between which the wanted one lies: a batch makes many answers as fast as one."""
    sample = next(iter(arrivals(cell, 1.0, block_s, times=times, seed=seed)(0)))
    alone_ms = engine.ms(Batch.of([Slice(sample.input_tokens, 0)]))
    alone_ms += sample.output_tokens * engine.ms(Batch.of([Slice(1, sample.input_tokens, True)]))
    rate = cell.busy * 1e3 / alone_ms
    return max(rate / 8, 1.5 / block_s), max(16 * rate, 3 / block_s)


def _busy(cell: Cell, rate: float, engine: EngineModel, block_s: float, times: float, seed: int) -> float:
    played = arrivals(cell, rate, 4 * block_s, times=times, seed=seed)
    return play(played(0), engine, 4 * block_s, until_s=4 * block_s).busy
