"""Promises as users write them: flags, the section of vLLM's configuration, JSON, and lines of status."""

from collections.abc import Sequence
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from conserve.cli import serve_flags, serve_notices, server_status
from conserve.config import default_home
from conserve.engine.policy.promises import Promises, rank
from conserve.engine.policy.view import Slo
from conserve.engine.section import EngineSection
from conserve.engine.vllm.settings import RequestedSettings, settings_of
from conserve.errors import SettingsError
from conserve.names import DEFAULT_HARM
from conserve.server_report import AloneReport, SloReport
from tests.server_reports import report

# torch's own while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

MIDDLE: dict[str, Any] = {"ttft_ms": None, "tbt_ms": {"p50": 40, "p99": 150, "mean": 60}, "harm": 0.2}


def slo_of(promises: Promises) -> SloReport:
    """The promises as a server reports them."""
    return report(slo=promises.document()).slo


def test_a_time_without_a_name_is_that_of_the_p99() -> None:
    assert Promises.of({"ttft_ms": 1500}).ttft_ms == {"p99": 1500.0}


def test_the_slo_has_the_largest_bound_of_each_latency() -> None:
    assert Promises.of(MIDDLE).slo == Slo(ttft_ms=inf, tbt_ms=150.0, harm=0.2)
    assert Promises.of({"tbt_ms": {"mean": 60}}).slo.tbt_ms == inf


def test_the_document_is_read_again() -> None:
    promises = Promises.of(MIDDLE)
    assert Promises.of(promises.document()) == promises
    assert promises.document()["tbt_ms"] == 150.0
    assert Promises.of(Promises().document()) == Promises()


def test_bounds_stand_in_the_order_of_their_quantiles() -> None:
    assert list(Promises.of({"tbt_ms": {"p99.9": 9, "p5": 1, "p50": 4}}).tbt_ms) == ["p5", "p50", "p99.9"]


@pytest.mark.parametrize("one", [{"ttft_ms": 9}, {"tbt_ms": {"mean": 9}}, {"harm": 0.1}])
def test_any_promise_is_one(one: dict[str, Any]) -> None:
    assert Promises.of(one).any
    assert not Promises.of({}).any


def test_two_quantiles_may_have_one_bound() -> None:
    assert Promises.of({"tbt_ms": {"p50": 40, "p99": 40}}).tbt_ms == {"p50": 40, "p99": 40}


def test_a_quantile_holds_for_its_share_of_the_latencies() -> None:
    assert [rank(name) for name in ("p99.9", "p50", "p5")] == pytest.approx([0.999, 0.5, 0.05])
    assert [rank(name) for name in ("mean", "max", "p100")] == [0, 0, 0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"tbt_ms": 0}, {"tbt_ms": inf}, {"tbt_ms": True}, {"tbt_ms": "40"}, {"tbt_ms": {"p50": -1}},
        {"tbt_ms": {"p0": 1}}, {"tbt_ms": {"p100": 1}}, {"tbt_ms": {"max": 1}}, {"tbt_ms": {"p50": 2, "p99": 1}},
        {"harm": 0}, {"harm": "10%"}, {"harm": True}, {"e2e_ms": 1},
    ],
)  # fmt: skip
def test_what_cannot_be_promised_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"promise|harm|less than"):
        Promises.of(wrong)


class TestFlags:
    """`--ttft-slo`, `--tbt-slo` and `--harm`."""

    def test_times_have_names_and_units(self) -> None:
        assert serve_flags.promise("--tbt-slo", "p50=40ms, p99=0.15s") == {"p50": 40.0, "p99": 150.0}
        assert serve_flags.promise("--tbt-slo", "mean=60") == {"mean": 60.0}
        assert serve_flags.promise("--tbt-slo", "100ms") == 100.0
        assert serve_flags.promise("--tbt-slo", None) is None

    @pytest.mark.parametrize(
        "text", ["p50=soon", "median=4ms", "p50=150ms,p99=40ms", "p50=", "p50=1s,p50=2s"]
    )
    def test_a_wrong_one_is_refused_in_a_sentence_that_names_the_flag(self, text: str) -> None:
        with pytest.raises(SettingsError, match="--tbt-slo"):
            serve_flags.promise("--tbt-slo", text)

    def test_harm_is_a_share_or_off(self) -> None:
        assert serve_flags.share("--harm", "10%") == 0.1
        assert serve_flags.share("--harm", " 2.5 %") == 0.025
        assert serve_flags.share("--harm", "off") is None
        for text in ("10", "0%", "much", "-5%"):
            with pytest.raises(SettingsError, match="--harm takes a share like 10%"):
                serve_flags.share("--harm", text)


class TestWholePrompts:
    """Engines that take all of a prompt in one iteration."""

    def config(self, section: dict[str, Any], **model: Any) -> Any:
        known = {"is_encoder_decoder": False, "runner_type": "generate", "hf_config": SimpleNamespace()}
        return SimpleNamespace(
            scheduler_config=SimpleNamespace(enable_chunked_prefill=False),
            model_config=SimpleNamespace(**{**known, **model}),
            additional_config={"conserve": {"profile": "auto", **section}},
        )

    @pytest.mark.parametrize(
        "section",
        [
            {"tbt_slo_ms": 100},
            {"ttft_slo_ms": 1000, "harm": None},
            {},  # the default harm
            {"harm": None, "classes": {"chat": {"tbt_slo_ms": 50}}},
        ],
    )
    def test_no_promise_can_be_kept_on_them(self, section: dict[str, Any]) -> None:
        with pytest.raises(SettingsError, match="leave out --no-enable-chunked-prefill"):
            settings_of(self.config(section))
        with pytest.raises(SettingsError, match="leave out --no-enable-chunked-prefill"):
            RequestedSettings(section=EngineSection.of(section)).install(self.config({}))
        read, _ = settings_of(self.config({"harm": None}))
        assert read.promises == Promises()

    @pytest.mark.parametrize("model", [{"is_encoder_decoder": True}, {"runner_type": "pooling"}])
    def test_of_models_that_are_never_cut_no_tbt_is_promised(self, model: dict[str, Any]) -> None:
        read, _ = settings_of(self.config({}, **model))
        assert read.promises.harm == DEFAULT_HARM
        with pytest.raises(SettingsError, match="vLLM cuts none for this model; leave it out"):
            settings_of(self.config({"tbt_slo_ms": 100}, **model))


def test_a_model_that_vllm_schedules_by_a_class_of_its_own_is_refused() -> None:
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(canvas_length=64)),
        additional_config={"conserve": {"profile": "auto"}},
    )
    for read in (settings_of, RequestedSettings(section=EngineSection()).install):
        with pytest.raises(SettingsError, match="schedules a diffusion model by a class of its own"):
            read(config)


class TestDefault:
    """The promise where the user promises nothing."""

    def test_no_promise_is_a_harm_of_ten_percent(self) -> None:
        assert EngineSection.of({}).promises == Promises(harm=DEFAULT_HARM)
        assert EngineSection.of({"ttft_slo_ms": None, "tbt_slo_ms": None}).promises == Promises(
            harm=DEFAULT_HARM
        )

    def test_the_latency_without_an_slo_has_the_default_harm(self) -> None:
        for said, other in (("ttft_slo_ms", "tbt_harm"), ("tbt_slo_ms", "ttft_harm")):
            promises = EngineSection.of({said: {"p50": 40, "p99": 1500}}).promises
            assert promises.harm is None
            harms = {"ttft_harm": promises.slo.ttft_harm, "tbt_harm": promises.slo.tbt_harm}
            assert harms == {"ttft_harm": None, "tbt_harm": None, other: DEFAULT_HARM}
            assert Promises.of(promises.document()) == promises

    def test_two_slos_or_a_harm_leave_no_default(self) -> None:
        for said in (
            {"ttft_slo_ms": 1500, "tbt_slo_ms": 100},
            {"ttft_slo_ms": 1500, "harm": 0.3},
            {"tbt_slo_ms": 100, "harm": None},
        ):
            assert EngineSection.of(said).promises.default_harm is None
        for promises in (Promises(harm=0.3), Promises.of({"ttft_ms": 1500, "harm": 0.3})):
            assert promises.with_default_harm() == promises

    def test_harm_can_be_promised_beside_an_slo_and_switched_off(self) -> None:
        assert EngineSection.of({"ttft_slo_ms": 1500, "harm": 0.05}).promises.harm == 0.05
        assert EngineSection.of({"harm": None}).promises == Promises()

    def test_a_wrong_section_is_refused_with_its_name(self) -> None:
        for section in ({"harm": -1}, {"tbt_slo_ms": {"p50": 9, "p99": 3}}):
            with pytest.raises(SettingsError, match=r"additional_config\.conserve: "):
                EngineSection.of(section)

    def test_the_server_says_what_it_promises(self) -> None:
        section = EngineSection()
        tenth, none = report(slo={"harm": 0.1}).slo, report().slo
        (line,) = serve_notices.by_default(tenth, section)
        assert line.startswith("rows add at most about 10% to live latencies; change it with --harm")
        assert serve_notices.by_default(tenth, EngineSection(harm=0.1)) == []
        assert serve_notices.by_default(none, section) == []
        assert serve_notices.by_default(tenth, EngineSection(policy="priority")) == []

    @pytest.mark.parametrize(
        ("first", "gaps", "more", "said"),
        [
            (None, 100, {}, ("TTFT", "--ttft-slo")),
            (900, None, {}, ("TBT", "--tbt-slo")),
            (900, 100, {}, None),
            (None, 100, {"harm": 0.1}, None),
            (None, 100, {"harm": None}, None),
            (None, 100, {"policy": "priority"}, None),
        ],
    )
    def test_the_server_says_what_the_latency_without_an_slo_is_promised(
        self, first: int | None, gaps: int | None, more: dict[str, Any], said: tuple[str, str] | None
    ) -> None:
        section = EngineSection.of({"ttft_slo_ms": first, "tbt_slo_ms": gaps, **more})
        lines = serve_notices.by_default(slo_of(section.promises), section)
        if said is None:
            assert lines == []
        else:
            latency, flag = said
            most = f"rows add at most about 10% to the {latency} of live requests"
            assert lines == [f"{most}; change it with --harm, or give {flag}"]


def test_the_smallest_bound_of_a_promise_is_the_one_that_may_be_too_tight() -> None:
    alone = AloneReport(prompt_tokens=128, ttft_ms=90.0, tbt_ms=21.0)
    section = EngineSection(tbt_slo_ms={"p50": 15.0, "p99": 150.0})
    (line,) = serve_notices.too_tight(alone, section)
    assert line == (
        "--tbt-slo 15ms cannot be kept: a token takes 21 ms on this machine with nothing beside it; rows wait "
        "while a live request gets tokens; raise it to 42ms, or give --harm 10% in its place"
    )
    (line,) = serve_notices.too_tight(alone, EngineSection(policy="priority", ttft_slo_ms=80.0))
    assert "rows wait" not in line, "another policy holds no rows back"
    assert serve_notices.too_tight(alone, EngineSection(tbt_slo_ms=21.0)) == []
    assert serve_notices.too_tight(None, section) == []


class TestStatus:
    """The line on live requests."""

    def test_promises_stand_beside_the_latencies(self) -> None:
        slo = slo_of(Promises.of(MIDDLE))
        assert server_status.promised(slo, "tbt_ms") == " of p50 40, p99 150, mean 60"
        assert server_status.promised(slo, "ttft_ms") == ""
        assert server_status.promised(slo_of(Promises.of({"tbt_ms": 150})), "tbt_ms") == " of 150"

    def test_a_broken_promise_is_named(self) -> None:
        slo, broken = slo_of(Promises.of(MIDDLE)), {"promised_ms": 40.0, "seen_ms": 50.0, "kept": False}

        def kept(**online: Any) -> str:
            return server_status.kept(slo, report(online=online).online)

        assert kept(promises={"tbt_ms": {"p50": broken, "p99": broken}}) == (
            "promise broken: TBT p50, TBT p99"
        )
        seen: dict[str, Any] = {"tbt_ms": {"p50": 9.0, "p99": 20.0}}
        assert kept(**seen, attainment=0.5, promises={"tbt_ms": {"p99": broken}}) == "SLO kept 50.0%"
        assert kept(**seen, attainment=0.995) == "SLO kept 99.5%"

    def test_an_slo_without_a_live_request_is_neither_kept_nor_broken(self) -> None:
        assert server_status.kept(slo_of(Promises.of(MIDDLE)), report().online) == "SLO kept -"

    def test_rows_that_are_held_back_are_named(self) -> None:
        def said(*late: str, alone_ms: float, paused: Sequence[str] = ()) -> list[str]:
            alone = {"prompt_tokens": 128, "ttft_ms": 90.0, "tbt_ms": alone_ms}
            slo = Promises.of({"ttft_ms": 1500, "tbt_ms": 150}).document()
            online = {"held_back": late, "paused_for": paused}
            return server_status.yielding(report(online=online, slo=slo, alone=alone))

        assert said(alone_ms=40.0) == []
        assert said("ttft_ms", "tbt_ms", alone_ms=40.0) == [
            "  rows add about 10% at most to TTFT and TBT, which are late too often; raise the SLOs, "
            "or add a server"
        ]
        too_tight = (
            "  TBT of 150 ms cannot be kept: a token takes 193 ms on this machine with nothing beside it; rows "
            "wait while a live request gets tokens; raise it to 390ms, or give --harm 10% in its place"
        )
        assert said("tbt_ms", alone_ms=193.4) == [too_tight]
        assert said("ttft_ms", "tbt_ms", alone_ms=193.4) == [
            too_tight,
            "  rows add about 10% at most to TTFT, which is late too often to keep its SLO; raise it, "
            "or add a server",
        ]

        assert said("ttft_ms", "tbt_ms", alone_ms=40.0, paused=["ttft_ms"]) == [
            "  rows pause for TTFT: they made more late than its SLO allows; raise it, or add a server",
            "  rows add about 10% at most to TBT, which is late too often to keep its SLO; raise it, "
            "or add a server",
        ]
        assert said(alone_ms=40.0, paused=["ttft_ms", "tbt_ms"]) == [
            "  rows pause for TTFT and TBT: they made more late than their SLOs allow; "
            "raise them, or add a server"
        ]
        pausing = too_tight.replace("rows wait while a live request gets tokens", "rows pause for it")
        assert said("tbt_ms", alone_ms=193.4, paused=["tbt_ms"]) == [pausing]

    def test_rows_yield_for_the_largest_promise_and_not_for_one_that_cannot_be_kept(self) -> None:
        alone = {"prompt_tokens": 128, "ttft_ms": 23.0, "tbt_ms": 5.0}
        slo = Promises.of({"ttft_ms": {"p50": 20, "p99": 150}}).document()
        online = {"held_back": ["ttft_ms"], "paused_for": ["ttft_ms"]}
        assert server_status.yielding(report(online=online, slo=slo, alone=alone)) == [
            "  rows pause for TTFT: they made more late than its SLO allows; raise it, or add a server"
        ]

    def test_a_harm_alone_is_named(self) -> None:
        slo = slo_of(Promises(harm=0.1))
        assert server_status.kept(slo, report().online) == "rows add at most about 10%"


def test_a_default_harm_is_no_promise_of_the_users() -> None:
    """A server without a latency model refuses what a user asked for, and starts with what it would do anyway."""
    said: tuple[dict[str, Any], ...] = ({}, {"harm": 0.1}, {"harm": None}, {"tbt_slo_ms": 9})
    assert [EngineSection.of(section).asked_harm for section in said] == [None, 0.1, None, None]
    assert EngineSection.of({}).promises.harm == EngineSection.of({"harm": 0.1}).promises.harm == 0.1


def test_a_printed_command_names_what_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from conserve.engine.vllm.server import printed

    monkeypatch.setattr(RequestedSettings, "times", lambda self, config: None)
    section = EngineSection(
        policy="conserve", harm=None, receipt=0.0, profiles=str(default_home() / "profiles")
    )
    assert printed.portable(section, None).document() == {"harm": None, "receipt": 0.0}
    assert printed.portable(EngineSection(), None).document() == {}
