"""Arrivals that engines have recorded, as traces: times and lengths of the live requests of the last day."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from conserve.bench.traces import Arrival, Trace
from conserve.errors import InputError

DAY_S = 86_400.0
FILES = ".csv"  # ending of the files, before that of the one before
LEAST = 50  # requests; fewer tell nothing about a P99


def read(folder: Path, *, now: float) -> list[Trace]:
    """The last day's live requests of a model, a trace an engine; raises `InputError` if there are too few.

    `folder` is the model's, beside those of the others. All traces have the same time 0 and duration.
    """
    since = now - DAY_S
    engines = _requests(folder, lambda at_s: since <= at_s <= now)
    at_s = sorted(one.at_s for requests in engines.values() for one in requests)
    if len(at_s) < LEAST:
        raise InputError(
            f"servers of this model have recorded {len(at_s)} live requests in the last day, and {LEAST} are the "
            f"fewest to tune by{_others(folder)}; name a trace with --trace, or tune after a day of conserve serve"
        )
    first_s, last_s = at_s[0], at_s[-1]
    duration_s = last_s - first_s + max((last_s - first_s) / (len(at_s) - 1), 1e-3)
    name = "the last day" + (f" of {len(engines)} engines" if len(engines) > 1 else "")
    return [
        Trace(
            name=name,
            duration_s=duration_s,
            arrivals=tuple(one._replace(at_s=one.at_s - first_s) for one in sorted(requests)),
        )
        for requests in engines.values()
    ]


def _others(folder: Path) -> str:
    """Models with recorded requests beside this one, in parentheses."""
    names = sorted(path.name for path in folder.parent.glob("*/") if path.is_dir() and path != folder)
    return f" (there are requests of {', '.join(names)} too)" if names else ""


def _requests(folder: Path, wanted: Callable[[float], bool]) -> Mapping[str, Sequence[Arrival]]:
    """Requests of the wanted times, by engine: each has a file of its own, and the one before that."""
    found: dict[str, list[Arrival]] = defaultdict(list)
    for path in sorted(folder.glob(f"*{FILES}*")):
        requests = [one for one in _lines(path) if wanted(one.at_s)]
        if requests:
            found[path.name.partition(FILES)[0]] += requests
    return found


def _lines(path: Path) -> Iterator[Arrival]:
    """Requests of a file; a line that a crash has cut short is left out."""
    for line in path.read_bytes().splitlines():
        parts = line.split(b",")
        try:
            at_s, (prompt, answer, *cached) = float(parts[0]), map(int, parts[1:])
        except ValueError:
            continue
        if len(cached) <= 1 and prompt >= 1 and answer >= 1:  # earlier versions told no tokens found
            yield Arrival(at_s, prompt, answer, *cached)


def parts(engines: Sequence[Trace], block_s: float, most: int) -> list[Trace]:
    """At most so many blocks of these traces, from the quietest to the busiest; none without a request.

    They are evenly spread over the blocks in the order of their number of requests, with the busiest among them.
    """
    found = sorted((block for trace in engines for block in _blocks(trace, block_s)), key=len)
    if len(found) <= most:
        return found
    return [found[round((number + 1) * len(found) / most) - 1] for number in range(most)]


def _blocks(trace: Trace, block_s: float) -> Iterable[Trace]:
    """Blocks from the trace's end back, without what is left over at its begin; a shorter trace is repeated."""
    if trace.duration_s < block_s:
        yield trace.looped(0.0, block_s)
        return
    for number in range(int(trace.duration_s // block_s), 0, -1):
        try:
            yield trace.cut(max(0.0, trace.duration_s - number * block_s), block_s)
        except InputError:  # no request in it
            continue
