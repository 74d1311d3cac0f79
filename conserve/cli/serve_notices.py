"""Sentences at the start of a service that cannot do all it was asked for, or that is open to all."""

from typing import TYPE_CHECKING

from msgspec import UNSET

from conserve.api.servers import bearer
from conserve.cli.too_tight import smallest_ms, why_broken
from conserve.config import Settings
from conserve.engine.policy.policies import traits
from conserve.engine.runtime.pushing import NEVER
from conserve.engine.section import EngineSection
from conserve.hosts import is_loopback
from conserve.names import CONSERVE, OFF

if TYPE_CHECKING:
    from conserve.server_report import AloneReport, PreemptionReport, SloReport


def open_to_all(host: str, settings: Settings) -> list[str]:
    """Warn if other machines can reach the server without a key."""
    if settings.api_key or is_loopback(host):
        return []
    return [
        f"no API key: any machine that reaches {host} may use the engine, overtake others and change what it does; "
        "set CONSERVE_API_KEY"
    ]


def batches_left_out(host: str) -> str:
    """Sentence of a server whose files and batches any machine would reach."""
    return f"no files and batches: {host} is for other machines, which need keys; run: conserve keys add NAME"


async def warnings(settings: Settings, section: EngineSection, url: str) -> list[str]:
    """Warnings once the server serves: an SLO that cannot be kept, iterations that rows cannot leave."""
    import httpx

    from conserve.server_report import PATH, UNREADABLE, read_scheduler

    try:
        async with httpx.AsyncClient(timeout=10.0, trust_env=False, headers=bearer(settings)) as client:
            said = read_scheduler((await client.get(f"{url}{PATH}")).raise_for_status().content)
    except (httpx.HTTPError, *UNREADABLE):
        return ["the server does not say how it does; is another plug-in in its way?"]
    found = [*too_tight(said.alone, section), *not_left(said.preemption, section)]
    told = [*only_counted(section), *by_default(said.slo, section)]
    return [*told, *pushed(section), *found, *never_tried()]


def never_tried() -> list[str]:
    """Warn of a vLLM that is newer than the tried ones; the server's log tells of its self-test."""
    from conserve.engine.vllm.compat.installed import untried

    return [] if (told := untried()) is None else [f"{told}; conserve doctor says what it does without"]


def only_counted(section: EngineSection) -> list[str]:
    """Warn if the policy ignores the SLO that was given."""
    said = {
        "--ttft-slo": section.ttft_slo_ms,
        "--tbt-slo": section.tbt_slo_ms,
        "--harm": section.asked_harm,
        "--class": section.classes or None,
    }
    flags = [flag for flag, value in said.items() if value is not None]
    if not flags or traits(section.policy).knows_slo:
        return []
    counted = f"{' and '.join(flags)} {'is' if len(flags) == 1 else 'are'} counted, and not kept"
    return [f"--policy {section.policy} knows no SLO: {counted}"]


def by_default(slo: "SloReport", section: EngineSection) -> list[str]:
    """Say what is promised where nothing was asked for: to both latencies, or to the one without an SLO."""
    if section.harm is not UNSET or section.policy != CONSERVE:
        return []
    if (harm := slo.harm) is not None:
        return [f"rows add at most about {harm:.0%} to live latencies; change it with --harm, or give an SLO"]
    if (harm := slo.default_harm) is None:
        return []
    what, slo_flag = ("TTFT", "--ttft-slo") if section.ttft_slo_ms is None else ("TBT", "--tbt-slo")
    most = f"rows add at most about {harm:.0%} to the {what} of live requests"
    return [f"{most}; change it with --harm, or give {slo_flag}"]


def pushed(section: EngineSection) -> list[str]:
    """Say what rows of --on-late push jobs may do, where --push-slo-scale is given."""
    scale = section.push_slo_scale
    if scale is None:
        return []
    if scale == NEVER or section.policy != CONSERVE:
        return [
            "rows of --on-late push jobs push nothing: that takes --push-slo-scale above 1 and --policy conserve"
        ]
    return [
        f"rows of --on-late push jobs that would be late fill iterations up to x{scale:g} of what is promised"
    ]


def not_left(preemption: "PreemptionReport", section: EngineSection) -> list[str]:
    """Warn if rows cannot leave iterations although preemption is on."""
    why = preemption.why_off
    if not why or section.leave_rule == OFF:
        return []
    return [f"live requests wait for the iteration under way, which rows cannot leave: {why}"]


def too_tight(alone: "AloneReport | None", section: EngineSection) -> list[str]:
    """Warn if the model cannot keep the SLO even without offline rows."""
    found = []
    for name, promised in (("ttft", section.ttft_slo_ms), ("tbt", section.tbt_slo_ms)):
        why = why_broken(f"{name}_ms", promised, alone, holds_rows=traits(section.policy).pauses_rows)
        if why is not None:
            found.append(f"--{name}-slo {smallest_ms(promised):g}ms cannot be kept: {why}")
    return found
