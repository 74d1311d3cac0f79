"""`--live-prefixes`, its key in the engine's section, and what is told of it."""

from typing import Any

import pytest

from conserve.cli import server_status
from conserve.cli.serve_flags import harm_of, live_prefixes_of, receipt_of
from conserve.engine.section import EngineSection
from conserve.engine.vllm.server.metrics import Report
from conserve.engine.vllm.server.printed import portable
from conserve.errors import SettingsError
from tests.server_reports import report

REPORT = report(
    live_prefixes={"kept_blocks": 7, "prompt_tokens": 1000, "found_tokens": 240, "lost_tokens": 32}
)


@pytest.mark.parametrize(
    ("given", "share"), [(None, 0.5), ("50%", 0.5), ("90 %", 0.9), ("0.5%", 0.005), ("off", 0.0)]
)
def test_the_flag_is_a_share_or_off(given: str | None, share: float) -> None:
    assert live_prefixes_of(given) == pytest.approx(share)


@pytest.mark.parametrize("given", ["half", "0.5", "0%", "-1%"])
def test_anything_else_is_refused(given: str) -> None:
    with pytest.raises(SettingsError, match=f"--live-prefixes takes a share like 10%, or off, not '{given}'"):
        live_prefixes_of(given)


def test_a_share_out_of_range_is_told_by_its_flag() -> None:
    with pytest.raises(SettingsError, match=r"^--live-prefixes takes at most 90%, not 91%$"):
        live_prefixes_of("91%")
    with pytest.raises(SettingsError, match=r"^--receipt takes at most 10%, not 20%$"):
        receipt_of("20%")
    assert (harm_of("250%"), receipt_of("10%"), live_prefixes_of("90%")) == (2.5, 0.1, 0.9)


def test_half_is_kept_where_nothing_is_said() -> None:
    assert EngineSection.of({}).live_prefixes == 0.5
    assert EngineSection.of({"live_prefixes": 0}).live_prefixes == 0.0


@pytest.mark.parametrize("share", [0.91, 1, -0.1, True, "half", None])
def test_rows_keep_some_memory(share: Any) -> None:
    with pytest.raises(SettingsError, match=r"live_prefixes takes a share from 0 to 0\.9, not"):
        EngineSection.of({"live_prefixes": share})


def test_a_printed_command_turns_it_off_too() -> None:
    section = EngineSection(live_prefixes=0.0, harm=0.1, profile="auto")
    assert portable(section, None).document()["live_prefixes"] == 0.0


def test_status_tells_what_was_found_and_lost() -> None:
    assert server_status.found(REPORT.live_prefixes) == [
        "  prefixes 24% of live prompts' tokens found in the cache, 3.2% lost to rows"
    ]
    lost = report(live_prefixes={"prompt_tokens": 1000, "lost_tokens": 32}).live_prefixes
    assert server_status.found(lost), "all was lost"
    none = report(live_prefixes={"prompt_tokens": 1000}).live_prefixes
    assert not server_status.found(none), "live prompts share nothing"


def test_metrics_have_it() -> None:
    samples = {
        sample.name: sample.value
        for metric in Report(REPORT, {}).collect()
        for sample in metric.samples
        if sample.name.startswith("conserve_live_pr")
    }
    assert samples == {
        "conserve_live_prompt_tokens_total": 1000,
        "conserve_live_prefix_tokens_found_total": 240,
        "conserve_live_prefix_tokens_lost_total": 32,
        "conserve_live_prefix_blocks": 7,
    }
