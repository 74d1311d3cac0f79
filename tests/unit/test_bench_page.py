"""The page of a comparison: the answer first, at any width, in the dark and on paper."""

import json
import re
from math import inf
from pathlib import Path
from typing import Any

import pytest

from conserve.bench.attainment import LatencyLimits
from conserve.bench.compare import Design
from conserve.bench.measure import Block, compare
from conserve.bench.pages import report, verdict
from conserve.bench.playing import Measurement
from conserve.bench.presets import FULL
from conserve.bench.simulate_online import EngineModel
from conserve.bench.sizing import Offered, Sized
from conserve.bench.traces import Arrival, Trace
from conserve.cli.bench_report import conclude
from conserve.profiles.conserve import PaperModel
from tests.unit.test_bench import answer, block, failed, four_policies

ANSWER = (
    "Under conserve 99% of clients' first tokens came within 198 ms (99 ms with no offline rows) and 99% of the "
    "next ones within 20 ms of the one before (10 ms); the queue got 80 tokens/s, 80% of what "
    "non-preemptive gave it."
)


def said(*blocks: Block) -> str:
    return verdict.sentence(compare(blocks))


def test_the_answer_is_one_sentence() -> None:
    assert said(*four_policies()) == ANSWER


def test_a_difference_that_may_be_chance_is_not_called_one() -> None:
    alone = [answer(ms) for ms in (10.0, 20.0, 30.0, 40.0)]
    told = said(block("online-only", alone), block("conserve", alone, offline_tokens=50))
    assert "within 40 ms (40 ms with no offline rows, no certain difference)" in told
    assert told.endswith("; the queue got 5 tokens/s.")


def test_the_answer_of_very_little_is_still_true() -> None:
    assert (
        said(block("conserve", [failed()])) == "Under conserve no client got a token; the queue got nothing."
    )
    alone = said(block("online-only", [answer(30.0, tokens=1)]))
    assert alone == (
        "With no offline rows 99% of clients' first tokens came within 30 ms; no other policy was measured."
    )
    some = said(block("conserve", [answer(30.0), failed()]))
    assert some == (
        "Under conserve more than 1% of clients got no whole answer, 1 of 2 requests failed; the queue got nothing."
    )
    assert "of what" not in said(block("non-preemptive", [answer(1.0)], offline_tokens=5))


def test_a_policy_that_loses_its_slowest_requests_has_the_longest_bar_and_no_better_figure() -> None:
    answers = [answer(float(ms), due_s=ms / 20) for ms in range(1, 201)]
    lost = [*answers[:190], *[failed(due_s=ms / 20) for ms in range(191, 201)]]
    comparison = compare([block("conserve", lost), block("online-only", answers)])
    assert comparison.policies["conserve"].ttft_ms == pytest.approx((100.0, 180.0, inf, inf))
    assert comparison.policies["online-only"].ttft_ms == pytest.approx((100.0, 180.0, 198.0, 200.0))
    first = verdict.chart(comparison).columns[0]
    assert [(bar.length, bar.value, bar.ratio) for bar in first.bars] == [
        (1.0, "failed", ""),
        (1.0, "198 ms", "1.00 x"),
    ]
    row, _ = report.table_rows(comparison).rows
    assert row[3:6] == ["100", "failed", "failed"]
    assert row[12:14] == ["1.00", "failed"]
    (receipt,) = report.receipts(comparison)
    assert "online P99 TTFT went from 198 ms to none, since more than 1 % failed and P99 TBT" in receipt
    document = comparison.document()
    json.dumps(document, allow_nan=False)
    assert document["policies"]["conserve"]["ttft_ms"]["p99"] is None
    assert document["harm"]["conserve"]["ttft_p99"]["with_ms"] is None
    without = compare([block("conserve", answers), block("online-only", lost)])
    assert without.harm["conserve"].ttft_p99 is None, "nothing to compare with"
    assert without.ratios["conserve"].ttft_p99_to_online_only is None


def test_the_chart_has_a_bar_for_every_policy_and_marks_the_clients_alone() -> None:
    chart = verdict.chart(compare(four_policies()))
    assert chart.policies == ["conserve", "online-only", "non-preemptive", "priority"]
    first, further, queue = chart.columns
    assert [bar.length for bar in first.bars] == pytest.approx([0.04, 0.02, 1.0, 0.2])
    assert [bar.value for bar in first.bars] == ["198 ms", "99 ms", "4,950 ms", "990 ms"]
    assert [bar.ratio for bar in first.bars] == ["2.00 x", "1.00 x", "50.00 x", "10.00 x"]
    assert (first.mark, further.mark, queue.mark) == (pytest.approx(0.02), pytest.approx(0.02), None)
    assert [bar.length for bar in queue.bars] == pytest.approx([0.8, 0.0, 1.0, 0.9])
    assert [bar.ratio for bar in queue.bars] == ["80%", "0%", "100%", "90%"]


def test_a_figure_that_was_not_measured_has_no_bar() -> None:
    chart = verdict.chart(compare([block("conserve", [failed()]), block("online-only", [])]))
    for column in chart.columns[:2]:
        assert [(bar.length, bar.value) for bar in column.bars] == [(0.0, "-"), (0.0, "-")]
        assert column.mark is None


def page() -> str:
    blocks = four_policies()
    return report.page(compare(blocks), blocks, stopped="Stopped after 4 of 8 blocks.")


def test_the_answer_and_its_chart_stand_before_everything_else() -> None:
    body = page().partition("<body>")[2]
    escaped = ANSWER.replace("'", "&#39;")
    places = [body.index(part) for part in (escaped, 'class="chart"', "<h2>", "<svg", "</body>")]
    assert places == sorted(places)
    assert body.index("Stopped after 4 of 8 blocks.") < body.index('class="chart"')


def test_nothing_on_the_page_is_wider_than_a_sheet_of_paper() -> None:
    """The body is as wide as its window, tables have few columns, drawings scale."""
    shown = page()
    assert "max-width" not in re.findall(r"^body \{.*?\}", shown, re.MULTILINE | re.DOTALL)[0]
    for head in re.findall(r"<thead>.*?</thead>", shown, re.DOTALL):
        assert head.count("<th") <= 12
    assert not re.findall(r"min-width: *\d{3,}px *;", shown)
    assert not re.findall(r"<svg[^>]* width=", shown)


def test_no_figure_of_the_terminal_is_missing_on_the_page() -> None:
    comparison = compare(four_policies())
    shown = page()
    for name in report.table_rows(comparison).header:
        assert f"<th>{name}</th>" in shown


def test_the_page_has_a_dark_scheme_and_prints_light() -> None:
    shown = page()
    assert "@media screen and (prefers-color-scheme: dark)" in shown
    assert "@media print" in shown
    assert 'name="viewport"' in shown


# The SLO that the report judges by


TRACE = Trace(name="t", duration_s=10.0, arrivals=(Arrival(0.0, 9, 4),))


def concluded(
    folder: Path, blocks: list[Block], known: dict[str, Any] | None = None, **slo: Any
) -> tuple[str, dict[str, Any]]:
    """The page and the JSON of a comparison of these blocks, under this SLO; `known` are an engine and rows."""
    design = Design(policies=[one.policy for one in blocks], rounds=1, block_s=10.0, **slo)
    offered = Offered(name="", source=lambda *_: lambda number: TRACE, flags=lambda rate: "", rate=1.0)
    measurement = Measurement(offered=offered, blocks=blocks, **(known or {}))
    measurement.sized = Sized(
        preset=FULL,
        design=design,
        source=offered.source(FULL, None),
        rate=1.0,
        lengths=1.0,
        chosen=False,
        forecasts=(),
    )
    assert conclude(measurement, folder, {}, as_json=False) == 0
    return (folder / "page.html").read_text(), json.loads((folder / "comparison.json").read_text())


def attained(document: dict[str, Any], policy: str) -> float:
    share: float = document["policies"][policy]["attainment"]["1.0"]["ttft"]
    return share


def test_a_given_slo_is_what_the_report_judges_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown, document = concluded(tmp_path, four_policies(), slo=LatencyLimits(151.0, 25.0))
    assert document["reference"] == {"ttft_ms": 151.0, "tbt_ms": 25.0}
    assert (attained(document, "conserve"), attained(document, "online-only")) == (0.75, 1.0)
    assert document["design"]["SLO"] == "given: TTFT 151 ms, TBT 25 ms"
    assert "Reference: the given SLO (TTFT 151 ms, TBT 25 ms)." in shown
    assert "TTFT of each request (ms), limit 151 ms" in shown
    assert "SLO attainment, by scale of the given SLO (TTFT 151 ms, TBT 25 ms)" in capsys.readouterr().out


def test_a_given_slo_needs_no_online_only(tmp_path: Path) -> None:
    shown, document = concluded(tmp_path, four_policies()[:1], slo=LatencyLimits(151.0, 25.0))
    assert attained(document, "conserve") == 0.75
    assert "Reference: the given SLO" in shown


def test_without_one_the_page_draws_the_scaled_limits_of_online_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, document = concluded(tmp_path, four_policies(), slo_scale=2.0)
    assert document["reference"] == pytest.approx({"ttft_ms": 99.0, "tbt_ms": 10.0})
    assert document["design"]["SLO"] == "2 x online-only's P99s: TTFT 198 ms, TBT 20 ms"
    assert "TTFT of each request (ms), limit 198 ms" in shown
    assert "by scale of online-only's P99s (TTFT 99 ms, TBT 10 ms)" in capsys.readouterr().out


# Rows beside all live work

TOKEN_MS = EngineModel(
    model=PaperModel.of(1, 0, 0, 10), max_tokens=100, max_requests=10
)  # each token adds 1 ms
RATES = ("rows_per_s", "rows_in_block_per_s", "of_non_preemptive")


def left_ms(policy: str) -> float:
    """Time that tokens after the end of the policy's block take; a prompt without its first token counts whole."""
    (played,) = (one for one in four_policies() if one.policy == policy)
    late = [sum(at > 10.0 for at in one.token_at_s) for one in played.answers]
    return float(sum(9 + 3 if tokens == 4 else tokens for tokens in late))


def rates(document: dict[str, Any], policy: str) -> list[float | None]:
    return [document["policies"][policy][name] for name in RATES]


def test_rows_are_told_beside_all_live_work_and_as_counted_in_the_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"engine": TOKEN_MS, "lengths": [(10, 11)]}  # a row takes 20 ms
    shown, document = concluded(tmp_path, four_policies(), known)
    ours, most = (
        (ms - left_ms(name)) / 20 / 10 for ms, name in ((800, "conserve"), (1000, "non-preemptive"))
    )
    assert most < 4.5
    assert rates(document, "conserve") == pytest.approx([ours, 4.0, ours / most])
    assert rates(document, "non-preemptive") == pytest.approx([most, 5.0, 1.0])
    assert rates(document, "online-only") == [None, 0.0, None]
    share = f"80% of what non-preemptive gave it ({ours / most:.0%} beside all live work)"
    told = capsys.readouterr().out
    assert share in told
    assert share in shown
    assert "rows: " not in told
    assert (
        document["design"]["rows"] == "10 tokens of prompt and 11 of answer on average, beside all live work"
    )


def test_beside_rows_of_unknown_lengths_work_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, document = concluded(tmp_path, four_policies(), {"engine": TOKEN_MS})
    ours, most = ((ms - left_ms(name)) for ms, name in ((2000, "conserve"), (1600, "non-preemptive")))
    assert rates(document, "conserve") == [None, None, pytest.approx(ours / most)]
    assert f"{ours / most:.0%} beside all live work" in shown
    assert "rows: the server's own, of unknown lengths" in capsys.readouterr().out


def test_without_a_latency_model_the_former_figures_stand_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, document = concluded(tmp_path, four_policies(), {"lengths": [(10, 11)]})
    assert rates(document, "conserve") == [None, None, None]
    assert document["policies"]["conserve"]["offline_tokens_per_s"] == 80
    told = capsys.readouterr().out
    assert "rows: not told beside all live work, since the server tells no latency model" in told
    assert "not told beside all live work" in shown
