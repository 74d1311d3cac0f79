"""Scores over the nights as an SVG: a line of means, a bar for each interval."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT = 900.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 68.0, 12.0, 12.0, 26.0


def chart(scores: Sequence[Mapping[str, Any]], *, title: str) -> str:
    """SVG of nights' scores, each `{"run", "began_at", "mean", "low", "high"}`."""
    low, high = bounds(scores)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    places = [x_of(n, len(scores)) for n in range(len(scores))]
    path = " ".join(f"{x:.1f},{y(one['mean']):.1f}" for x, one in zip(places, scores, strict=True))
    marks = "".join(mark(x, one, y) for x, one in zip(places, scores, strict=True))
    return (
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="{escape(title)}">'
        f"{grid(low, high, y)}"
        f'<polyline class="line" points="{path}"/>{marks}{dates(places, scores)}</svg>'
    )


def bounds(scores: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Least and largest value of the scale."""
    low, high = min(one["low"] for one in scores), max(one["high"] for one in scores)
    margin = 0.08 * (high - low) or 0.05 * (abs(high) or 1.0)
    return low - margin, high + margin


def x_of(night: int, nights: int) -> float:
    """Place of a night; the last lies at the right edge."""
    step = (WIDTH - LEFT - RIGHT - 12) / max(1, nights - 1)
    return WIDTH - RIGHT - 6 - (nights - 1 - night) * step


def grid(low: float, high: float, y: Any) -> str:
    """Lines of the scale, with their values."""
    values = [low + (high - low) * share for share in (0.1, 0.5, 0.9)]
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text x="{LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{v:.3g}</text>'
        for v in values
    )


def mark(x: float, one: Mapping[str, Any], y: Any) -> str:
    """A night: its interval and its mean."""
    said = f"{one['run']}: {one['mean']:.4g} ({one['low']:.3g} to {one['high']:.3g})"
    return (
        f"<g><title>{escape(said)}</title>"
        f'<line class="bar" x1="{x:.1f}" x2="{x:.1f}" y1="{y(one["low"]):.1f}" y2="{y(one["high"]):.1f}"/>'
        f'<circle cx="{x:.1f}" cy="{y(one["mean"]):.1f}" r="3.5"/></g>'
    )


def dates(places: Sequence[float], scores: Sequence[Mapping[str, Any]]) -> str:
    """Dates of the first and the last night."""
    first, last = str(scores[0]["began_at"])[:10], str(scores[-1]["began_at"])[:10]
    end = f'<text x="{places[-1]:.1f}" y="{HEIGHT - 6}" text-anchor="end">{last}</text>'
    if places[-1] - places[0] < 200:
        return end
    return f'<text x="{places[0]:.1f}" y="{HEIGHT - 6}">{first}</text>{end}'
