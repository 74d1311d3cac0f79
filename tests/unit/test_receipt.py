"""The harm receipt: pauses drawn at random, and live latencies with offline work over those in the pauses."""

from collections import Counter
from random import Random
from typing import Any

import pytest

from conserve.cli import server_status
from conserve.engine.runtime.latency_bins import bin_of
from conserve.engine.runtime.receipt import (
    EXPECTED_S,
    KEPT,
    LEAST,
    LEAST_FOR_P99,
    LEAST_LATENCIES,
    LONGEST_S,
    SETTLE_S,
    SLOT_S,
    Receipt,
    compared,
)
from conserve.engine.section import EngineSection
from conserve.errors import SettingsError
from tests.server_reports import report

# torch's own while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


class Drawn(Random):
    """Dice that show what they are told, again and again."""

    def __init__(self, *values: float) -> None:
        super().__init__(0)
        self._values, self._next = values, 0

    def random(self) -> float:
        self._next += 1
        return self._values[(self._next - 1) % len(self._values)]


PAUSE, COMPARED, NEITHER = 0.0, 0.02, 0.9  # of a share of 1 %


def receipt(*draws: float) -> Receipt:
    """A receipt that live traffic has just reached."""
    made = Receipt(dice=Drawn(*draws))
    made.arrived(at=0.0)
    return made


def answer(of: Receipt, *, at: float, ttft_s: float, tbt_s: float) -> None:
    """A request with two tokens."""
    of.arrived(at=at)
    of.answered(arrived=at, at=at + ttft_s)
    of.tbt(1, last=at + ttft_s, at=at + ttft_s + tbt_s)


def cut_short(*draws: float) -> Receipt:
    """A receipt whose slot since 1.0 s ends with the rows' pause at 3.0 s; one of its two requests waits then."""
    made = receipt(*draws)
    made.pauses(offline=True, now=1.0)
    answer(made, at=2.0, ttft_s=0.2, tbt_s=0.1)
    made.arrived(at=2.5)
    made.skip(now=3.0)
    return made


def played(
    slots: int, *, slower: float, draws: tuple[float, ...] = (PAUSE, COMPARED), seed: int = 1
) -> Receipt:
    """A receipt after so many slots, in which live latencies are `slower` times as long beside offline work."""
    made, dice = receipt(*draws), Random(seed)
    for slot in range(slots):
        start = slot * SLOT_S
        factor = 1.0 if made.pauses(offline=True, now=start) else slower
        for n in range(4):
            scatter = factor * dice.uniform(0.9, 1.1)
            answer(made, at=start + SETTLE_S + n / 4, ttft_s=0.2 * scatter, tbt_s=0.02 * scatter)
    made.pauses(offline=True, now=slots * SLOT_S)
    return made


class TestPauses:
    """Pauses, in which no offline token is computed."""

    def test_a_drawn_slot_is_a_pause_from_its_start_to_its_end(self) -> None:
        made = receipt(PAUSE, NEITHER)
        assert made.pauses(offline=True, now=1.0)
        assert made.pauses(offline=True, now=1.0 + SLOT_S - 0.01)
        assert not made.pauses(offline=True, now=1.0 + SLOT_S)

    def test_none_begins_without_live_traffic_or_without_rows(self) -> None:
        assert not Receipt(dice=Drawn(PAUSE)).pauses(offline=True, now=0.0)
        assert not receipt(PAUSE).pauses(offline=True, now=EXPECTED_S + 1)
        assert not receipt(PAUSE).pauses(offline=False, now=1.0)

    def test_none_begins_where_the_receipt_is_off(self) -> None:
        off = Receipt(share=0.0, dice=Drawn(PAUSE))
        off.arrived(at=0.0)
        assert not off.pauses(offline=True, now=1.0)

    def test_a_slot_goes_on_until_its_requests_have_a_token(self) -> None:
        made = receipt(PAUSE, NEITHER)
        made.pauses(offline=True, now=1.0)
        made.arrived(at=2.0)
        assert made.pauses(offline=True, now=1.0 + SLOT_S)
        assert not made.pauses(offline=True, now=1.0 + LONGEST_S), "but not for ever"
        made = receipt(PAUSE, NEITHER)
        made.pauses(offline=True, now=1.0)
        made.arrived(at=2.0)
        made.gone(arrived=2.0)
        assert not made.pauses(offline=True, now=1.0 + SLOT_S), "a client hung up"

    def test_no_slot_counts_while_rows_pause_for_a_promise(self) -> None:
        made = receipt(COMPARED)
        assert not made.pauses(offline=True, now=0.0)
        made.skip(now=1.0)
        for number in range(50):
            at = 1.0 + SETTLE_S + number * 0.5
            answer(made, at=at, ttft_s=0.1, tbt_s=0.1)
            made.skip(now=at)
        assert not made.pauses(offline=True, now=26.0)
        made.pauses(offline=True, now=26.0 + SLOT_S)
        assert made.report()["compared"] == 0

    def test_a_comparison_counts_up_to_the_moment_at_which_rows_pause(self) -> None:
        """Rows do most harm in these moments: a receipt without them would flatter."""
        made = cut_short(COMPARED, PAUSE)
        answer(made, at=3.1, ttft_s=9.9, tbt_s=9.9)  # without rows
        assert made.report()["compared"] == 0, "one that came beside rows still waits"
        made.answered(arrived=2.5, at=3.3)
        made.skip(now=3.4)
        assert made.report()["compared"] == 1
        made.skip(now=5.0)
        assert made.report()["compared"] == 1
        assert made.pauses(offline=True, now=6.0)
        answer(made, at=6.0 + SETTLE_S, ttft_s=0.1, tbt_s=0.1)
        made.arrived(at=10.0)
        made.pauses(offline=True, now=6.0 + SLOT_S + 20)
        (beside,), (pause,) = made._kept[False], made._kept[True]
        assert beside.ttft == {bin_of(200.0): 1, bin_of(800.0): 1}
        assert pause.ttft == {bin_of(100.0): 1}

    def test_a_comparison_waits_no_longer_where_rows_pause(self) -> None:
        made = cut_short(COMPARED, NEITHER)
        made.skip(now=1.0 + LONGEST_S)
        assert made.report()["compared"] == 1

    def test_a_pause_of_the_receipts_is_dropped_in_one_for_a_promise(self) -> None:
        made = receipt(PAUSE, NEITHER)
        assert made.pauses(offline=True, now=1.0)
        answer(made, at=2.0, ttft_s=0.2, tbt_s=0.1)
        made.skip(now=3.0)
        assert not made.pauses(offline=True, now=3.1)
        made.pauses(offline=True, now=3.1 + SLOT_S)
        assert made.report()["pauses"] == 0

    def test_their_share_is_that_which_was_asked_for(self) -> None:
        made, paused = Receipt(share=0.1, dice=Random(3)), 0
        for slot in range(5000):
            made.arrived(at=slot * SLOT_S)
            paused += made.pauses(offline=True, now=slot * SLOT_S)
        assert paused / 5000 == pytest.approx(0.1, abs=0.015)


class TestReport:
    """P50 and P99 with and without offline work."""

    @pytest.mark.parametrize("slower", [1.0, 1.3, 3.0])
    def test_the_interval_holds_the_harm(self, slower: float) -> None:
        said = played(80, slower=slower).report()
        assert (said["pauses"], said["compared"]) == (40, 40)
        for latency in ("ttft_ms", "tbt_ms"):
            middle = said[latency]["p50"]
            assert middle["low"] <= slower * 1.03
            assert middle["high"] >= slower / 1.03
            assert middle["ratio"] == pytest.approx(slower, rel=0.1)
        assert said["ttft_ms"]["p50"]["without_ms"] == pytest.approx(200, rel=0.05)

    def test_few_pauses_have_wide_intervals_and_fewer_have_none(self) -> None:
        def width(slots: int) -> float:
            one = played(slots, slower=1.3).report()["ttft_ms"]["p50"]
            return float(one["high"] - one["low"])

        assert width(2 * LEAST) > width(400)
        one = played(2 * LEAST - 2, slower=1.3).report()["ttft_ms"]["p50"]
        assert one["ratio"] > 1
        assert (one["low"], one["high"]) == (None, None)

    def test_nothing_is_said_of_a_p99_of_few_latencies(self) -> None:
        """The P99 of a hundred is the largest one, and that of four times as many is longer without any harm."""

        def p99(pauses: int, latencies: int) -> Any:
            beside = [{bin_of(200.0): 15}] * 80
            return compared(beside, [{bin_of(200.0): latencies}] * pauses)["p99"]

        assert p99(LEAST_FOR_P99, LEAST_LATENCIES // LEAST_FOR_P99)["low"] == 1.0
        assert p99(LEAST_FOR_P99 - 1, LEAST_LATENCIES) is None
        assert p99(LEAST_FOR_P99, LEAST_LATENCIES // LEAST_FOR_P99 - 1) is None

    def test_an_interval_seldom_shows_a_harm_where_there_is_none(self) -> None:
        """The alert asks its low end: 1.10 is what `--harm 10%` allows."""
        dice = Random(1)

        def slot() -> Counter[int]:
            return Counter(bin_of(200 * dice.lognormvariate(0.0, 0.5)) for _ in range(15))

        alarms = Counter(
            name
            for _ in range(60)
            for name, one in compared([slot() for _ in range(80)], [slot() for _ in range(20)]).items()
            if one["low"] > 1.1
        )
        assert max(alarms["p50"], alarms["p99"]) <= 3, alarms

    def test_nothing_is_said_before_there_are_latencies_of_both_kinds(self) -> None:
        assert Receipt().report()["ttft_ms"] == {"p50": None, "p99": None}
        assert played(10, slower=2.0, draws=(COMPARED,)).report()["tbt_ms"] == {"p50": None, "p99": None}

    def test_the_start_of_a_slot_does_not_count(self) -> None:
        made = receipt(PAUSE, COMPARED)
        for start in (1.0, 1.0 + SLOT_S):
            made.pauses(offline=True, now=start)
            answer(made, at=start + SETTLE_S / 2, ttft_s=0.01, tbt_s=0.01)
            answer(made, at=start + 1.0, ttft_s=0.1, tbt_s=0.1)
        made.pauses(offline=True, now=1.0 + 2 * SLOT_S)
        assert made.report()["ttft_ms"]["p50"]["with_ms"] == pytest.approx(100, rel=0.02)

    def test_a_change_of_the_policy_starts_it_anew(self) -> None:
        made = played(20, slower=2.0)
        made.restart()
        assert made.report()["ttft_ms"]["p50"] is None

    def test_only_the_newest_slots_are_kept(self) -> None:
        made = played(4 * KEPT, slower=1.0)
        assert made.report()["pauses"] == 2 * KEPT
        assert max(len(slots) for slots in made._kept.values()) == KEPT

    def test_a_bin_is_two_percent_wide(self) -> None:
        assert bin_of(101.0) - bin_of(50.0) == pytest.approx(35, abs=1)
        assert compared([{bin_of(100.0): 1}], [{bin_of(100.0): 1}])["p50"]["ratio"] == 1.0


class TestShown:
    """Settings and figures that users see."""

    def test_status_has_the_ratios_and_their_intervals(self) -> None:
        one: dict[str, Any] = {"with_ms": 210.0, "without_ms": 200.0, "ratio": 1.05, "low": 0.98, "high": 1.1}
        ttft_ms = {"p50": one, "p99": {**one, "low": None, "high": None}}
        assert server_status.harmed(report(harm={"pauses": 12, "ttft_ms": ttft_ms}).harm) == [
            "  harm     TTFT p50 x1.05 [0.98, 1.10], TTFT p99 x1.05 (12 pauses of rows)"
        ]
        assert server_status.harmed(report(harm={"ttft_ms": ttft_ms}).harm) == []

    def test_a_server_measures_for_one_percent_unless_told_otherwise(self) -> None:
        assert EngineSection.of({}).pausing_share == 0.01
        assert EngineSection.of({"receipt": 0.0}).pausing_share == 0.0
        assert EngineSection.of({"control": True}).pausing_share == 0.0, "a benchmark would be paused"
        assert EngineSection.of({"control": True, "receipt": 0.02}).pausing_share == 0.02
        for wrong in (True, "1%", 0.5, -0.1):
            with pytest.raises(SettingsError, match=r"additional_config\.conserve\.receipt takes a share"):
                EngineSection.of({"receipt": wrong})
