"""Drawings of a comparison, after conserve-2026, Figure 7."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from conserve.bench.answers import Floats, LoadAnswer, RequestEnd, ttfts_ms
from conserve.bench.attainment import LatencyLimits
from conserve.bench.measure import ORDER, Block, by_policy
from conserve.bench.pages import svg
from conserve.bench.pages.svg import Scale

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1000.0, 70.0, 16.0, 28.0, 44.0
GAP = 40.0  # pixels between panels, with the lower one's heading
BINS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600)
MOST_BINS = 600
SPARE = 8  # colours of the page beyond those of the policies
LETTER = 7.5  # width of a letter in pixels, about


class Stage(NamedTuple):
    """Blocks, scale and colours that all panels of the timeline share."""

    blocks: Sequence[Block]  # in order of time
    x: Scale
    bin_s: float
    slo: LatencyLimits | None
    colours: Mapping[str, str]

    def colour(self, block: Block) -> str:
        """Colour class of a block's policy."""
        return self.colours[block.policy]

    def shift_s(self, block: Block) -> float:
        """Start of the block on the timeline, in s."""
        return block.started_s - self.blocks[0].started_s


class Panel(NamedTuple):
    """A chart of the stack: its heading, its vertical scale, its content."""

    heading: str
    y: Scale
    content: str


class Series(NamedTuple):
    """Values over time: the middles of bins, in seconds since the comparison began."""

    at_s: Floats
    values: Floats


def colours(policies: Iterable[str]) -> dict[str, str]:
    """Colour classes of the policies, for the page and the drawings.

    The first variant of a policy has the policy's own colour where the plain one is not shown.
    """
    found: dict[str, str] = {}
    others = 0
    for name in policies:
        policy = name.partition("/")[0]
        number = ORDER.index(policy) if policy in ORDER else None
        if number is None or f"p{number}" in found.values():
            number, others = len(ORDER) + others % SPARE, others + 1
        found[name] = f"p{number}"
    return found


def timeline(blocks: Sequence[Block], slo: LatencyLimits | None) -> str:
    """Draw online requests, TTFT, TBT and offline tokens over the same time."""
    blocks = sorted(blocks, key=lambda block: block.started_s)
    end_s = max(block.started_s + block.duration_s for block in blocks) - blocks[0].started_s
    x = Scale(low=0.0, high=end_s, start=LEFT, end=WIDTH - RIGHT)
    bin_s = next((b for b in BINS_S if end_s / b <= MOST_BINS), BINS_S[-1])
    stage, bottom = Stage(blocks, x, bin_s, slo, colours(by_policy(blocks))), TOP
    panels: list[Panel] = []
    for draw, height in ((_requests, 80), (_ttfts, 180), (_tbts, 130), (_offline, 130)):
        top, bottom = bottom + GAP, bottom + GAP + height
        panels.append(draw(stage, top, bottom))
    drawn = [_shades(stage, bottom), *(_framed(panel, x) for panel in panels), _time_axis(x, bottom)]
    return svg.picture("".join(drawn), WIDTH, bottom + BOTTOM, "Requests and tokens over time")


def _requests(stage: Stage, top: float, bottom: float) -> Panel:
    series = [(block, _arrivals(block, stage)) for block in stage.blocks]
    y = svg.linear([float(v) for _, s in series for v in s.values], start=bottom, end=top)
    drawn = [svg.line(_steps(s, stage, y), f"series {stage.colour(block)}") for block, s in series]
    return Panel("Online requests per second", y, "".join(drawn))


def _ttfts(stage: Stage, top: float, bottom: float) -> Panel:
    limit_ms = stage.slo.ttft_ms if stage.slo else None
    known = [ms for block in stage.blocks for ms in ttfts_ms(block.answers).tolist()]
    y = svg.logarithmic([*known, limit_ms or 0.0], start=bottom, end=top)
    drawn = [_dots(block, stage, y) for block in stage.blocks]
    return Panel(
        _with_limit("TTFT of each request (ms)", limit_ms),
        y,
        "".join([*drawn, _limit(limit_ms, stage.x, y)]),
    )


def _tbts(stage: Stage, top: float, bottom: float) -> Panel:
    limit_ms = stage.slo.tbt_ms if stage.slo else None
    series = [(block, _tbt_p99s(block, stage)) for block in stage.blocks]
    known = [float(v) for _, s in series for v in s.values]
    y = svg.logarithmic([*known, limit_ms or 0.0], start=bottom, end=top)
    return Panel(
        _with_limit(f"P99 TBT in each {stage.bin_s:g} s (ms)", limit_ms),
        y,
        _lines(series, stage, y) + _limit(limit_ms, stage.x, y),
    )


def _offline(stage: Stage, top: float, bottom: float) -> Panel:
    series = [(block, _offline_rates(block, stage)) for block in stage.blocks]
    y = svg.linear([float(v) for _, s in series for v in s.values], start=bottom, end=top)
    return Panel("Offline tokens per second", y, _lines(series, stage, y))


def _arrivals(block: Block, stage: Stage) -> Series:
    """Requests due per second."""
    edges = np.arange(0, block.duration_s + stage.bin_s, stage.bin_s)
    counts, _ = np.histogram([answer.due_s for answer in block.answers], edges)
    return Series((edges[:-1] + edges[1:]) / 2 + stage.shift_s(block), counts / stage.bin_s)


def _tbt_p99s(block: Block, stage: Stage) -> Series:
    """P99 TBT of the gaps that end within each bin, in ms."""
    with_gaps = [np.array(answer.token_at_s) for answer in block.answers if answer.tokens > 1]
    ends_s = np.concatenate([np.zeros(0), *(at_s[1:] for at_s in with_gaps)])
    gaps_ms = np.concatenate([np.zeros(0), *(np.diff(at_s) for at_s in with_gaps)]) * 1e3
    number = (ends_s // stage.bin_s).astype(int)
    found = {n: np.percentile(gaps_ms[number == n], 99, method="inverted_cdf") for n in np.unique(number)}
    at_s = (np.array([*found], dtype=np.float64) + 0.5) * stage.bin_s
    within = at_s <= block.duration_s  # later gaps lie in the next block's time
    p99_ms = np.array([*found.values()], dtype=np.float64)
    return Series((at_s + stage.shift_s(block))[within], p99_ms[within])


def _offline_rates(block: Block, stage: Stage) -> Series:
    """Offline tokens/s between samples a bin apart, or the block's mean if it was not sampled."""
    shift_s = stage.shift_s(block)
    if len(block.offline_series) < 2:
        mean = block.offline_tokens / block.duration_s
        return Series(np.array([0.0, block.duration_s]) + shift_s, np.array([mean, mean]))
    at_s, tokens = np.array(block.offline_series, dtype=np.float64).T
    bins = max(1, math.floor((at_s[-1] - at_s[0]) / stage.bin_s))
    edges = np.linspace(at_s[0], at_s[-1], bins + 1)
    rates = np.diff(np.interp(edges, at_s, tokens)) / np.diff(edges)
    return Series((edges[:-1] + edges[1:]) / 2 + shift_s, rates)


def _steps(series: Series, stage: Stage, y: Scale) -> list[tuple[float, float]]:
    """Points of a staircase through the bins."""
    half_s = stage.bin_s / 2
    return [
        (min(stage.x(t + side * half_s), stage.x.end), y(value))
        for t, value in zip(*series, strict=True)
        for side in (-1, 1)
    ]


def _lines(series: Sequence[tuple[Block, Series]], stage: Stage, y: Scale) -> str:
    """Draw a line for each block."""
    return "".join(
        svg.line([(stage.x(t), y(v)) for t, v in zip(*s, strict=True)], f"series {stage.colour(block)}")
        for block, s in series
    )


def _dots(block: Block, stage: Stage, y: Scale) -> str:
    """Draw a dot for each request and a cross for each failed one, at most one on a pixel."""
    drawn: dict[tuple[int, int], str] = {}
    for answer in block.answers:
        at_s = stage.shift_s(block) + answer.due_s
        failed = answer.status is not RequestEnd.OK
        across, down = stage.x(at_s), y.end + 4 if failed else y(answer.ttft_ms or 0)
        told = f"{block.policy}, {at_s:.1f} s: {_told(answer)}"
        draw = svg.cross if failed else svg.dot
        drawn[round(across), round(down)] = draw(across, down, stage.colour(block), told)
    return "".join(drawn.values())


def _told(answer: LoadAnswer) -> str:
    if answer.status is not RequestEnd.OK:
        return f"failed, {answer.status.value} ({answer.detail})"
    return f"TTFT {svg.figure(answer.ttft_ms or 0)} ms, {answer.input_tokens} tokens in, {answer.tokens} out"


def _limit(ms: float | None, x: Scale, y: Scale) -> str:
    return "" if ms is None else svg.line([(x.start, y(ms)), (x.end, y(ms))], "slo")


def _with_limit(heading: str, ms: float | None) -> str:
    return heading if ms is None else f"{heading}, limit {svg.figure(ms)} ms"


def _framed(panel: Panel, x: Scale) -> str:
    """Draw the panel's heading and axis behind its content."""
    y = panel.y
    drawn = [svg.text(panel.heading, x.start, y.end - 9, "heading")]
    for tick in y.ticks(5):
        drawn.append(svg.line([(x.start, y(tick)), (x.end, y(tick))], "grid"))
        drawn.append(svg.text(svg.figure(tick), x.start - 8, y(tick) + 4, "tick", "end"))
    return "".join([*drawn, panel.content])


def _time_axis(x: Scale, bottom: float) -> str:
    minutes = x.high > 300
    unit_s = 60.0 if minutes else 1.0
    drawn = [
        svg.text(svg.figure(tick), x(tick * unit_s), bottom + 18, "tick", "middle")
        for tick in svg.ticks(0, x.high / unit_s, 10)
    ]
    name = f"time ({'min' if minutes else 's'})"
    return "".join([*drawn, svg.text(name, (x.start + x.end) / 2, bottom + 36, "tick", "middle")])


def _shades(stage: Stage, bottom: float) -> str:
    """Draw the policy of each block: a strip on top, and a shade behind all panels."""
    drawn = []
    ends_s = [*(stage.shift_s(later) for later in stage.blocks[1:]), math.inf]
    for block, next_s in zip(stage.blocks, ends_s, strict=True):
        start_s = stage.shift_s(block)
        left = stage.x(start_s)
        width = stage.x(min(start_s + block.duration_s, next_s)) - left
        told = svg.title(f"{block.policy}, from {start_s:.0f} s for {block.duration_s:.0f} s")
        for kind, top, height in (("strip", TOP - 16, 18), ("shade", TOP + 4, bottom - TOP - 4)):
            place = {"x": left, "y": top, "width": width, "height": height}
            drawn.append(svg.element("rect", told, **place, class_=f"{kind} {stage.colour(block)}"))
        names = (block.policy, block.policy.rpartition("/")[2])
        fitting = next((name for name in names if width > LETTER * len(name)), None)
        if fitting is not None:
            drawn.append(svg.text(fitting, left + width / 2, TOP - 3, "on-strip", "middle"))
    return "".join(drawn)
