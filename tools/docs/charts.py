"""Charts of the benchmark pages, drawn from the figures in their tables."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from conserve.bench.pages import svg
from tools.docs.tables import Table, numbers, tables, under

WIDTH = 720.0
LETTER = 7.5  # pixels of a letter, about
BAR = 18.0
STEP = 26.0  # from bar to bar
PANEL = 34.0  # pixels of a panel's heading
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.heading{font-weight:600}.figure{fill:#57606a}"
    ".bar{fill:#8c959f}.ours{fill:#0969da}.other{fill:#bf5b17}.limit{stroke:#cf222e;stroke-dasharray:4 3}"
    "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.figure{fill:#9da7b3}.bar{fill:#6e7681}"
    ".ours{fill:#4493f8}.other{fill:#e0823d}}"
)


class Bar(NamedTuple):
    """A bar: its name, its length, the text behind it, and its class of colour."""

    name: str
    value: float
    text: str
    kind: str = "bar"


class Panel(NamedTuple):
    """Bars under a heading; `limit` is the value of a dashed line across them."""

    heading: str
    bars: Sequence[Bar]
    limit: float | None = None


class Chart(NamedTuple):
    """A chart of a page: its panels from the page's tables."""

    page: str
    label: str
    panels: Callable[[list[Table]], list[Panel]]
    side_by_side: bool = False


def draw(docs: Path, chart: Chart) -> str:
    """The chart as SVG, from the page in `docs`/benchmarks."""
    panels = chart.panels(tables(docs / "benchmarks" / chart.page))
    left = LETTER * max(len(bar.name) for one in panels for bar in one.bars) + 16
    parts = [svg.element("style", STYLE)]
    if chart.side_by_side:
        middle = left + (WIDTH - left) / 2
        height = PANEL + STEP * len(panels[0].bars) + 8
        parts += [panel(panels[0], 0, left, middle - 20), panel(panels[1], 0, middle, WIDTH, named=False)]
    else:
        height = 0.0
        for one in panels:
            parts.append(panel(one, height, left, WIDTH))
            height += PANEL + STEP * len(one.bars) + 8
    return svg.picture("".join(parts), WIDTH, height, chart.label) + "\n"


def panel(shown: Panel, top: float, left: float, right: float, *, named: bool = True) -> str:
    """Bars from `left` on, their longest with its text ending at `right`."""
    longest = max([bar.value for bar in shown.bars] + ([shown.limit] if shown.limit is not None else []))
    room = right - left - LETTER * max(len(bar.text) for bar in shown.bars) - 14
    parts = [svg.text(shown.heading, left, top + 20, "heading")]
    y = top + PANEL
    for bar in shown.bars:
        length = bar.value / longest * room
        if named:
            parts.append(svg.text(bar.name, left - 8, y + 14, anchor="end"))
        parts.append(svg.element("rect", x=left, y=y, width=max(length, 1.0), height=BAR, class_=bar.kind))
        parts.append(svg.text(bar.text, left + length + 6, y + 14, "figure"))
        y += STEP
    if shown.limit is not None:
        x = left + shown.limit / longest * room
        parts.append(svg.element("line", x1=x, y1=top + PANEL - 4, x2=x, y2=y - 4, class_="limit"))
    return "".join(parts)


def first(table: Table, beginning: str, column: int, number: int = 0) -> float:
    """A number of a cell: that of this row, column and place in the cell."""
    return numbers(table.row(beginning)[column])[number]


def live_and_queue(found: list[Table]) -> list[Panel]:
    """P99 TTFT of live requests, beside the rows per second, by policy."""
    table = under(found, "Each policy on servers of its own")
    policies = (
        ("online-only", "no queue", "bar"),
        ("conserve", "ConServe, P99s promised", "ours"),
        ("conserve/harm", "ConServe, harm of 10 %", "ours"),
        ("sarathi-p", "vLLM's priorities, tuned", "other"),
    )
    latency, queue = [], []
    for policy, name, kind in policies:
        row = next(row for row in table.rows if row[0] == policy)
        ttft, rows = numbers(row[1])[1], numbers(row[3])[0]
        latency.append(Bar(name, ttft, f"{ttft:,.0f} ms", kind))
        queue.append(Bar(name, rows, f"{rows:.2f}", kind))
    return [Panel("P99 TTFT of live requests", latency), Panel("queue, rows/s", queue)]


def on_off(found: list[Table]) -> list[Panel]:
    """P99 TTFT and TBT by policy over ON/OFF phases."""
    table = under(found, "ON/OFF phases")
    names = (
        ("online-only", "no queue", "bar"),
        ("conserve", "ConServe", "ours"),
        ("conserve/never", "uninterrupted", "bar"),
        ("priority", "vLLM's priority", "other"),
    )
    rows = [(next(row for row in table.rows if row[0].split(",")[0] == n), name, k) for n, name, k in names]
    return [
        Panel(heading, [Bar(name, v := numbers(row[column])[1], f"{v:,.0f} ms", k) for row, name, k in rows])
        for heading, column in (("P99 TTFT", 1), ("P99 TBT", 2))
    ]


def simulated(found: list[Table]) -> list[Panel]:
    """P99 TTFT over uninterrupted's, beside its bound, by arrivals."""
    table = found[0]
    ours = next(row for row in table.rows if row[0].startswith("P99 TTFT lower"))
    bound = next(row for row in table.rows if row[0] == "prompts alone")
    bars = []
    for column, name in enumerate(
        ("ON/OFF", "bursty, 0.2/s", "0.4/s", "0.8/s", "the paper's, 1/s", "2/s"), 1
    ):
        gain, most = numbers(ours[column])[0], numbers(bound[column])[0]
        bars.append(Bar(name, gain, f"{gain:g} of at most {most:g} times", "ours"))
    return [Panel("P99 TTFT lower than uninterrupted", bars)]


def resume(found: list[Table]) -> list[Panel]:
    """Time of restoring a row as a share of computing it again, by context."""
    table = found[0]
    names = (
        ("resume at 1,000", "1,000 tokens"),
        ("the same at 3,000", "3,000"),
        ("the same at 6,000", "6,000"),
    )
    shares = [(name, first(table, beginning, 1)) for beginning, name in names]
    return [
        Panel(
            "restored / computed again; dashed: the target of 20 %",
            [Bar(name, share, f"{share:g} %", "ours") for name, share in shares],
            limit=20.0,
        )
    ]


def scheduling(found: list[Table]) -> list[Panel]:
    """Time that scheduling adds to an iteration."""
    table = found[0]
    names = (
        ("scheduling adds", "256 offline"),
        ("the same, 128", "128 of them online"),
        ("the same, 256 online", "256 online, no rows"),
    )
    times = [(name, first(table, beginning, 1)) for beginning, name in names]
    return [
        Panel(
            "added to an iteration; dashed: the limit of 0.5 ms",
            [Bar(name, ms, f"{ms:g} ms", "ours") for name, ms in times],
            limit=0.5,
        )
    ]


def models(found: list[Table]) -> list[Panel]:
    """Mean error of the latency models on unseen batches."""
    table = found[0]
    names = (
        ("MAPE", "ConServe's", "ours"),
        ("the same, the paper", "the paper's", "bar"),
        ("the same, HyGen", "HyGen's", "other"),
    )
    return [
        Panel(
            "mean absolute error on unseen mixed batches",
            [Bar(name, v := first(table, beginning, 1), f"{v:g} %", kind) for beginning, name, kind in names],
        )
    ]


def prefix_order(found: list[Table]) -> list[Panel]:
    """Throughput of prefix order over input order."""
    table = found[0]
    mmlu = first(table, "prefix order / input order, MMLU", 1)
    gsm8k = first(table, "prefix order / input order, GSM8K", 1)
    nothing = 1 / first(table, "prefix order / input order, nothing", 1)
    bars = [
        Bar("57 prefixes (MMLU)", mmlu, f"{mmlu:g} times", "ours"),
        Bar("one prefix (GSM8K)", gsm8k, f"{gsm8k:g} times", "ours"),
        Bar("nothing shared", nothing, f"{nothing:.2f} times", "ours"),
    ]
    return [Panel("throughput of prefix order / input order", bars, limit=1.0)]


def queue(found: list[Table]) -> list[Panel]:
    """Figures of the queue as shares of their limits."""
    table = found[0]
    figures = (
        ("submit 1,000,000 short rows, input", "submit, a million rows", "s"),
        ("status of that store", "status", "ms"),
        ("CPU time of all store work", "store work in a run", "%"),
    )
    bars = []
    for beginning, name, unit in figures:
        row = table.row(beginning)
        value, most = numbers(row[1])[0], numbers(row[3])[0]
        bars.append(Bar(name, value / most, f"{value:g} of {most:g} {unit}", "ours"))
    return [Panel("share of the limit (dashed)", bars, limit=1.0)]


def run_batch(found: list[Table]) -> list[Panel]:
    """Rows/s of conserve run over run_batch, pair by pair, of the last session."""
    cell = found[1].rows[-1][1].partition("(")[0]
    bars = [Bar(f"pair {n}", ratio, f"{ratio:.3f}", "ours") for n, ratio in enumerate(numbers(cell), 1)]
    return [Panel("conserve run / run_batch, rows/s, the last session; dashed: equal", bars, limit=1.0)]


def start(found: list[Table]) -> list[Panel]:
    """Start of commands beside the start of python."""
    table = found[0]
    shown, status = table.row("`conserve --help`")[1], table.row("`conserve status`")[1]
    bars = [
        Bar("python alone", v := numbers(shown)[1], f"{v:g} ms"),
        Bar("conserve --help", v := numbers(shown)[0], f"{v:g} ms", "ours"),
        Bar("conserve status", v := numbers(status)[0], f"{v:g} ms", "ours"),
    ]
    return [Panel("from the start of the process to its end", bars)]


def soak(found: list[Table]) -> list[Panel]:
    """Kills by the phase that they hit."""
    rows = [row for row in found[0].rows if row[0] != "all"]
    bars = [
        Bar(row[0], hits := sum(sum(numbers(cell)) for cell in row[1:]), f"{hits:.0f}", "ours")
        for row in rows
    ]
    return [Panel("kills that hit this phase", bars)]


CHARTS = {
    "live-and-queue.svg": Chart(
        "harm.md", "P99 TTFT of live requests and rows of the queue, by policy", live_and_queue, True
    ),
    "on-off.svg": Chart("harm.md", "P99 TTFT and TBT over ON/OFF phases, by policy", on_off, True),
    "simulation.svg": Chart("simulation.md", "P99 TTFT lower than uninterrupted, simulated", simulated),
    "resume.svg": Chart("memory.md", "Time of restoring a row beside computing it again", resume),
    "scheduling.svg": Chart("scheduler.md", "Time that scheduling adds to an iteration", scheduling),
    "latency-model.svg": Chart("latency-model.md", "Mean error of the latency models", models),
    "prefix-order.svg": Chart("prefix.md", "Throughput of prefix order over input order", prefix_order),
    "queue.svg": Chart("queue.md", "Figures of the queue as shares of their limits", queue),
    "run-batch.svg": Chart("run-batch.md", "Rows per second of conserve run over run_batch", run_batch),
    "start.svg": Chart("start.md", "Start of commands beside the start of python", start),
    "soak.svg": Chart("soak.md", "Kills by the phase that they hit", soak),
}
