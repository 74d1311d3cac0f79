"""Arrivals that servers have recorded, as a trace: times and lengths of the live requests of the last day."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from conserve.bench.traces import Arrival, Trace
from conserve.errors import InputError

DAY_S = 86_400.0
LEAST = 50  # requests; fewer tell nothing about a P99


def read(folder: Path, *, now: float) -> Trace:
    """The last day's live requests of a model in order of their arrival; raises `InputError` if there are too few.

    `folder` is the model's, beside those of the others.
    """
    since = now - DAY_S
    found = sorted(one for one in _requests(folder) if since <= one.at_s <= now)
    if len(found) < LEAST:
        raise InputError(
            f"servers of this model have recorded {len(found)} live requests in the last day, and {LEAST} are the "
            f"fewest to tune by{_others(folder)}; name a trace with --trace, or tune after a day of conserve serve"
        )
    first_s = found[0].at_s
    arrivals = tuple(one._replace(at_s=one.at_s - first_s) for one in found)
    gap_s = arrivals[-1].at_s / (len(arrivals) - 1)
    return Trace(name="the last day", duration_s=arrivals[-1].at_s + max(gap_s, 1e-3), arrivals=arrivals)


def _others(folder: Path) -> str:
    """Models with recorded requests beside this one, in parentheses."""
    names = sorted(path.name for path in folder.parent.glob("*/") if path.is_dir() and path != folder)
    return f" (there are requests of {', '.join(names)} too)" if names else ""


def _requests(folder: Path) -> Iterator[Arrival]:
    """Requests of all files; a line that a crash has cut short is left out."""
    for path in sorted(folder.glob("*.csv*")):
        for line in path.read_bytes().splitlines():
            parts = line.split(b",")
            try:
                at_s, prompt, answer = float(parts[0]), int(parts[1]), int(parts[2])
            except (ValueError, IndexError):
                continue
            if len(parts) == 3 and prompt >= 1 and answer >= 1:
                yield Arrival(at_s, prompt, answer)


def parts(trace: Trace, block_s: float, most: int) -> list[Trace]:
    """At most so many blocks of the trace, from its quietest to its busiest; none without a request.

    They are evenly spread over the blocks in the order of their number of requests, with the busiest among them.
    """
    found = sorted(_blocks(trace, block_s), key=len)
    if len(found) <= most:
        return found
    return [found[round((number + 1) * len(found) / most) - 1] for number in range(most)]


def _blocks(trace: Trace, block_s: float) -> Iterable[Trace]:
    duration_s = min(block_s, trace.duration_s)
    for number in range(max(1, int(trace.duration_s // duration_s))):
        try:
            yield trace.cut(number * duration_s, duration_s)
        except InputError:  # no request in it
            continue
