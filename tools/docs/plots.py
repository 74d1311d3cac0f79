"""Dot plots of the benchmark pages: which figures of the pages' tables they show."""

from collections.abc import Callable, Iterator, Sequence

from tools.docs.charts import Bar, Chart, Panel
from tools.docs.dots import Axis, Dot, Plot, Row
from tools.docs.tables import Table, numbers, under

SETTINGS = {
    "a": "ON/OFF",
    "b": "bursty, 0.4/s",
    "c": "bursty, 1.2/s",
    "d": "the paper's setting, 0.5/s",
}
PROMISES = (
    ("none", "no promise"),
    ("`--harm 5%`", "--harm 5%"),
    ("`--harm 10%`", "--harm 10%"),
    ("`--harm 25%`", "--harm 25%"),
    ("`--harm 50%`", "--harm 50%"),
    ("P50s twice", "P50s x2, P99s x1"),
    ("P99s as", "P99s x1"),
)
ATTEMPTS = (
    ("kills", ("kill -9", "kill -15", "kill -STOP"), 0),
    ("power cuts", ("power cuts",), 0),
    ("full disks", ("full disks",), 0),
    ("damaged files", ("damaged files",), 0),
    ("odd answers of servers", ("odd answers",), 0),
    ("harvesters frozen", ("2 harvesters", "5 harvesters", "20 harvesters"), 0),
    ("clocks set by an hour", ("5 harvesters", "20 harvesters"), 1),
    ("late results", ("2 harvesters", "5 harvesters", "20 harvesters"), -1),
    ("SQL statements", ("SQL",), 0),
    ("requests of a client", ("fields of requests",), 1),
)


def cells(row: Sequence[str], columns: Sequence[int], mark: str = "a") -> list[list[Dot]]:
    """The first number of each of these cells, each on an axis of its own."""
    return [[Dot(numbers(row[column])[0], mark)] for column in columns]


def together(*rows: Sequence[Sequence[Dot]]) -> list[list[Dot]]:
    """Dots of several rows on one, axis by axis."""
    return [[dot for dots in axis for dot in dots] for axis in zip(*rows, strict=True)]


def exchange(found: list[Table]) -> list[Row]:
    """Each promise with its TBT and its offline tokens in the four settings."""
    return [
        Row(
            name,
            together(
                *(
                    cells(table.row(beginning), (3, 4, 5), mark)
                    for mark, table in zip(SETTINGS, found, strict=False)
                )
            ),
        )
        for beginning, name in PROMISES
    ]


def late(found: list[Table]) -> list[Row]:
    """Rows late by their order: the median day, with the least and the most."""
    rows = []
    for row in under(found, "Late work").rows:
        days = [[Dot(v, "small") for v in numbers(row[column])[1:]] for column in (1, 4)]
        rows.append(Row(row[0].strip("*"), together(days, cells(row, (1, 4)))))
    return rows


def late_axes(found: list[Table]) -> list[Axis]:
    """An axis for each trace; dashed is the goal, half of first come's late rows."""
    first = under(found, "Late work").row("first come")
    names = ("azure_conv, late rows", "BurstGPT, late rows")
    return [
        Axis(name, low=0.0, high=38.0, limits=[numbers(first[column])[0] / 2], unit=" %")
        for name, column in zip(names, (1, 4), strict=True)
    ]


def forecasts(found: list[Table]) -> list[Row]:
    """Jobs done by their forecasts, by trace."""
    return [
        Row(row[0].replace("`", ""), together(cells(row, (1,)), cells(row, (2,), "b")))
        for row in under(found, "Calibration").rows
    ]


def attempts(found: list[Table]) -> list[Row]:
    """Attempts by kind."""
    rows = []
    for name, beginnings, place in ATTEMPTS:
        tried = sum(numbers(found[0].row(beginning)[1])[place] for beginning in beginnings)
        rows.append(Row(name, [[Dot(tried, text=f"{tried:,.0f}")]]))
    tried = sum(numbers(row[1])[0] for row in found[1].rows)
    return [*rows, Row("inputs", [[Dot(tried, text=f"{tried:,.0f}")]])]


def attempts_axes(found: list[Table]) -> list[Axis]:
    """An axis whose heading tells the rows lost and doubled in all attempts."""
    lost, doubled = (
        sum(sum(numbers(row[column])) for table in found for row in table.rows) for column in (2, 3)
    )
    return [Axis(f"tried; rows lost: {lost:.0f}, doubled: {doubled:.0f}", log=True)]


def groups(table: Table) -> Iterator[tuple[str, str, list[str]]]:
    """Rows of a sweep's table: the cells that they are of, their policy, and the row."""
    group = ""
    for row in table.rows:
        group = row[0] or group
        yield group, row[1].strip("`"), row


def swept(table: Table, first: str, second: str, columns: Sequence[int]) -> list[Row]:
    """Policies of a sweep, each in two groups of cells."""
    read = {(group, policy): row for group, policy, row in groups(table)}
    policies = dict.fromkeys(policy for _, policy in read)
    start = next(group for group, _ in read if group.startswith(second))
    return [
        Row(
            policy,
            together(cells(read[first, policy], columns), cells(read[start, policy], columns, "b")),
        )
        for policy in policies
    ]


def turned(found: list[Table]) -> list[Row]:
    """Ways of taking turns, with the figures of two kinds of arrivals."""
    table = under(found, "Where rows cannot leave alone")
    return [
        Row(
            name,
            [
                [Dot(numbers(table.rows[place][column])[0], mark) for mark, place in (("a", n), ("b", n + 4))]
                for n in range(3)
            ],
        )
        for column, name in enumerate(table.header[1:], 1)
    ]


def busier(found: list[Table]) -> list[Row]:
    """P99 TTFT and TBT to online-only's, and offline tokens, by policy."""
    rows = []
    for row in under(found, "More live traffic, shorter iterations").rows:
        ttft, tbt = numbers(row[4])
        policy = row[0].partition(":")[0]
        rows.append(Row(policy, [[Dot(ttft)], [Dot(tbt)], [Dot(numbers(row[5])[0])]]))
    return rows


def busier_axes(found: list[Table]) -> list[Axis]:
    """Axes of these; dashed is the target of both latencies."""
    target = numbers(under(found, "Against the targets").row("P99 TTFT, TBT to online-only")[1])
    return [
        Axis("P99 TTFT, times", low=0.9, high=1.9, limits=target),
        Axis("P99 TBT, times", low=0.9, high=1.9, limits=target),
        LATENCIES[2],
    ]


def stock(found: list[Table]) -> list[Row]:
    """P50 and P99 to stock vLLM's, and offline tokens/s, by policy."""
    rows = []
    for row in under(found, "Beside stock vLLM, and with the default promise").rows:
        ttft, tbt = ([Dot(v, m) for v, m in zip(numbers(row[n]), "ab", strict=True)] for n in (3, 4))
        rows.append(Row(row[0], [ttft, tbt, [Dot(numbers(row[5])[0], "c")]]))
    return rows


def reactions(found: list[Table]) -> list[Row]:
    """Each reaction by the layers between safepoints; a dashed stroke is the time of as many layers."""
    return [
        Row(
            f"every {row[0]}",
            [[Dot(share, "small") for share in numbers(row[2])]],
            numbers(row[1]),
        )
        for row in found[1].rows
    ]


def window(found: list[Table]) -> list[Row]:
    """Longest wait with its bound, and tokens reused, by utility."""
    rows = []
    for utility, wait, bound, reused, clogged in under(found, "Across jobs", 1).rows:
        never = wait.startswith("over")
        waits = [Dot(numbers(wait)[0], "a", "never" if never else "")]
        waits += [Dot(most, "b") for most in numbers(bound)]
        shares = [Dot(numbers(reused)[0], "a"), Dot(numbers(clogged)[0], "c")]
        rows.append(Row(f"utility {utility}", [waits, shares]))
    return rows


def harness(found: list[Table]) -> list[Panel]:
    """Differences of log-likelihoods by task, and the processor time of an item by part."""
    tasks = []
    for beginning, name in (("MMLU", "MMLU five-shot"), ("TruthfulQA", "TruthfulQA's shape")):
        value, power = numbers(found[1].row(beginning)[4])
        difference = value * 10**power * 1e6
        tasks.append(Bar(name, difference, f"{difference:.1f} millionths", "ours"))
    for beginning, name in (("GSM8K", "GSM8K five-shot"), ("HumanEval", "HumanEval's shape")):
        equal, of = numbers(found[1].row(beginning)[4])
        tasks.append(Bar(name, 0.0 if equal == of else 1.0, f"{equal:.0f} of {of:.0f} texts equal", "ours"))
    parts = [
        Bar(row[0], v := numbers(row[1])[0], f"{v:.3g} us", "bar" if place else "ours")
        for place, row in enumerate(found[2].rows)
    ]
    return [
        Panel("largest difference of a log-likelihood, and of texts", tasks),
        Panel(
            "processor time of an item; dashed: the target of the first",
            parts,
            limit=numbers(found[0].row("Processor time")[2])[0],
        ),
    ]


def fixed(*axes: Axis) -> Callable[[list[Table]], Sequence[Axis]]:
    """These axes, whatever the tables say."""
    return lambda _: axes


RATIOS = "latencies as times online-only's; offline work as a share of non-preemptive's"
LATENCIES = (
    Axis("P99 TTFT, times", log=True),
    Axis("P99 TBT, times", log=True),
    Axis("offline tokens, share", low=0.0, high=1.1),
)

PLOTS = {
    "exchange.svg": Plot(
        "exchange.md",
        "Median and P99 TBT of live requests, and offline tokens, by promise",
        fixed(
            Axis("P50 TBT, times", log=True),
            Axis("P99 TBT, times", log=True),
            Axis("offline tokens, share", low=0.0, high=1.05),
        ),
        exchange,
        SETTINGS,
        RATIOS,
    ),
    "late-rows.svg": Plot(
        "deadlines.md",
        "Rows late by their order, on two traces",
        late_axes,
        late,
        {"a": "median of six days", "small": "the best and the worst day"},
        "dashed: half of first come's",
    ),
    "forecasts.svg": Plot(
        "deadlines.md",
        "Jobs done by their 90 % and 50 % forecasts, by trace",
        fixed(
            Axis(
                "jobs done by it; dashed: goal of the 90 % forecast",
                low=40.0,
                high=100.0,
                limits=(85.0, 95.0),
                unit=" %",
            )
        ),
        forecasts,
        {"a": "90 % forecast", "b": "50 % forecast"},
    ),
    "broken.svg": Plot("broken.md", "Attempts to break it, by kind", attempts_axes, attempts),
    "sweep.svg": Plot(
        "simulation.md",
        "P99 TTFT and TBT and offline rows by policy, in the middle and in the worst of 24 cells",
        fixed(*LATENCIES[:2], Axis("offline rows, share", low=0.0, high=1.1)),
        lambda found: swept(
            under(found, "Other baselines"), "median of 24 cells", "worst of 24 cells", (3, 5, 9)
        ),
        {"a": "median of 24 cells", "b": "worst of 24 cells"},
        RATIOS,
    ),
    "sweep-grid.svg": Plot(
        "simulation.md",
        "P99 TTFT and TBT and offline rows by policy, in the middle and in the worst of 216 cells",
        fixed(*LATENCIES[:2], Axis("offline rows, share", low=0.0, high=1.1)),
        lambda found: swept(
            under(found, "Over operating points"), "median of 216 cells", "worst of 216 cells", (3, 5, 9)
        ),
        {"a": "median of 216 cells", "b": "worst of 216 cells"},
        RATIOS,
    ),
    "sweep-before.svg": Plot(
        "simulation.md",
        "P99 TTFT and TBT and offline tokens by policy, in the middle of 24 cells and in the worst one",
        fixed(*LATENCIES),
        lambda found: swept(
            under(found, "Over operating points", 5), "median of 24 cells", "**the worst cell**", (3, 5, 6)
        ),
        {"a": "median of 24 cells", "b": "the worst cell"},
        RATIOS,
    ),
    "turns.svg": Plot(
        "simulation.md",
        "P99 TTFT and TBT and offline tokens per second by the way of taking turns",
        fixed(
            Axis("P99 TTFT, times", low=0.8, high=1.8),
            Axis("P99 TBT, times", low=0.8, high=1.8),
            Axis("offline tokens/s"),
        ),
        turned,
        {"a": "ON/OFF", "b": "bursty, 0.4/s"},
        "latencies as times online-only's",
    ),
    "harm-busier.svg": Plot(
        "harm.md",
        "P99 TTFT and TBT to online-only's and offline tokens by policy, with more live traffic",
        busier_axes,
        busier,
        note="to online-only's, share of non-preemptive's; dashed: the target",
    ),
    "harm-stock.svg": Plot(
        "harm.md",
        "TTFT and TBT to stock vLLM's, and offline tokens per second, by promise",
        fixed(Axis("TTFT, times", low=0.5, high=1.3), Axis("TBT, times", log=True), Axis("offline tokens/s")),
        stock,
        {"a": "P50", "b": "P99"},
        "latencies as times stock vLLM's",
    ),
    "preemption-reaction.svg": Plot(
        "preemption.md",
        "Time from the flag to the scheduler, in percent of an iteration of 2,048 tokens",
        fixed(Axis("from the flag to the scheduler; dashed: as many layers", unit=" %")),
        reactions,
    ),
    "waiting-window.svg": Plot(
        "prefix.md",
        "Longest wait and reused prompt tokens over utility",
        fixed(
            Axis("longest wait, in turns", log=True),
            Axis("prompt tokens reused", low=0.0, high=80.0, unit=" %"),
        ),
        window,
        {"a": "measured", "b": "at most", "c": "where one row in 100 shares nothing"},
    ),
}
CHARTS = {
    "harness.svg": Chart(
        "harness.md", "Differences of lm-eval's answers, and processor time of an item", harness
    ),
}
