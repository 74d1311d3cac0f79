"""SVG for charts: elements, scales, axes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

STEPS = (1, 2, 5, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Scale that maps values from `low` to `high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        value, low, high = (
            (math.log(max(v, self.low)) for v in (value, self.low, self.high))
            if self.log
            else (value, self.low, self.high)
        )
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, most: int) -> list[float]:
        """Round values on the scale, about `most` of them."""
        return log_ticks(self.low, self.high, most) if self.log else ticks(self.low, self.high, most)


def linear(values: Iterable[float], *, start: float, end: float) -> Scale:
    """Scale from zero to the largest value."""
    return Scale(low=0.0, high=max([*values, 0.0]) * 1.05 or 1.0, start=start, end=end)


def logarithmic(values: Iterable[float], *, start: float, end: float) -> Scale:
    """Scale from 1/1.3 of the smallest positive value to 1.3 times the largest."""
    positive = [value for value in values if value > 0] or [1.0]
    return Scale(low=min(positive) / 1.3, high=max(positive) * 1.3, start=start, end=end, log=True)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / max(1, most)
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * n for n in STEPS if power * n >= rough * 0.999)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten; with their multiples by 2 and 5 where there is room for them."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine, coarse = (
        [n * 10.0**power for power in powers for n in steps if low <= n * 10.0**power <= high]
        for steps in ((1, 2, 5), (1,))
    )
    return fine if len(fine) <= most or len(coarse) < 2 else coarse


def figure(value: float) -> str:
    """Number with three digits, thousands separated, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def element(tag: str, content: str = "", /, **attributes: str | float) -> str:
    """An element; `class_` and `text_anchor` become `class` and `text-anchor`."""
    written = "".join(
        f" {name.rstrip('_').replace('_', '-')}={quoteattr(_attribute(value))}"
        for name, value in attributes.items()
    )
    return f"<{tag}{written}>{content}</{tag}>" if content else f"<{tag}{written}/>"


def _attribute(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def text(content: str, x: float, y: float, class_: str = "", anchor: str = "start") -> str:
    """Words at a point."""
    return element("text", escape(content), x=x, y=y, class_=class_, text_anchor=anchor)


def title(content: str) -> str:
    """Tooltip of the parent element."""
    return element("title", escape(content))


def line(points: Sequence[tuple[float, float]], class_: str) -> str:
    """A line through these points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return element("polyline", points=path, class_=class_)


def dot(x: float, y: float, class_: str, told: str) -> str:
    """A dot with a tooltip."""
    return element("circle", title(told), cx=x, cy=y, r=2.0, class_=f"dot {class_}")


def cross(x: float, y: float, class_: str, told: str) -> str:
    """A cross with a tooltip."""
    strokes = f"M{x - 4:.1f},{y - 4:.1f} l8,8 m0,-8 l-8,8"
    return element("path", title(told), d=strokes, class_=f"cross {class_}")


def picture(content: str, width: float, height: float, label: str) -> str:
    """Whole drawing, which scales with the page."""
    return element(
        "svg",
        content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=label,
    )
