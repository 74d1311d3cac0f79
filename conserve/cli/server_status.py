"""Lines of `conserve status` on the servers that run over this store."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from conserve.api.servers import ASKED_AT_ONCE, Unreported, aged, ask
from conserve.cli import output
from conserve.config import Settings
from conserve.jobs.harvest.services import running

if TYPE_CHECKING:
    from conserve.server_report import (
        ByLatency,
        CheckpointReport,
        ClassReport,
        HarmReport,
        LiveReport,
        PreemptionReport,
        PrefixesReport,
        PushingReport,
        Quantiles,
        RatioReport,
        SchedulerReport,
        SloReport,
        SpillReport,
    )


class AskedServer(NamedTuple):
    """A server that runs over the store, and what it says."""

    url: str
    said: "SchedulerReport | Unreported"


def read_servers(settings: Settings) -> list[AskedServer]:
    """Answer of each server's `GET /v1/conserve`."""
    urls = [server.url for server in running(settings)]
    if not urls:  # the usual case: status imports nothing for it
        return []
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        return list(map(AskedServer, urls, pool.map(lambda url: ask(url, settings), urls)))


def lines(servers: Sequence[AskedServer]) -> list[str]:
    """Lines on each server: online, offline, latency model, prefixes, iterations that rows left, checkpoints."""
    shown: list[str] = []
    for url, said in servers:
        if not isinstance(said, Unreported):
            shown += reported(url, said)
        elif said.error is not None:
            shown.append(f"{url}  {said.error}")
        else:
            shown.append(headed(url, "  runs another scheduler"))
    return [*shown, ""] if shown else []


def reported(url: str, said: "SchedulerReport") -> list[str]:
    """Lines on a server that reports."""
    from conserve.engine.policy.policies import kept_promises

    by_class = said.classes or {}
    return [
        headed(url, f"  policy {said.policy}, last minute{until(said)}:"),
        online_line(said.online, None if said.classes else kept_promises(said.slo, said.policy)),
        *classes({name: (one, kept_promises(one.slo, said.policy)) for name, one in by_class.items()}),
        *yielding(said),
        *on_the_way(said.online.way_ms),
        f"  offline  {said.offline.tokens_per_s:,.0f} tokens/s",
        *harmed(said.harm),
        *found(said.live_prefixes),
        *pushed(said.pushing),
        predicted(said),
        left(said.preemption, said.offline.tokens),
        *checkpointed(said.checkpoint),
    ]


def headed(url: str, words: str) -> str:
    """Line on a server, its address shortened as far as a terminal is too narrow."""
    room = output.width()
    most = len(url) if room is None else max(output.LEAST, room - output.places(words))
    return f"{output.with_ellipsis(url, most)}{words}"


def until(said: "SchedulerReport") -> str:
    """When the last minute ended, if that is not now."""
    ago = aged(said.age_s)
    return f" until {ago}" if ago is not None else ""


def online_line(online: "LiveReport", slo: "SloReport | None") -> str:
    """Line on all live requests; where they have classes, the promises stand beside each class."""
    if slo is None:
        return f"  online   TTFT {pair(online.ttft_ms)}, TBT {pair(online.tbt_ms)}"
    return f"  online   {latencies(online, slo)}, {kept(slo, online)}"


def classes(by_class: "Mapping[str, tuple[ClassReport, SloReport]]") -> list[str]:
    """A line on each class of live traffic, indented below the line on all of them."""
    width = max(map(len, by_class), default=0)
    return [
        f"    {name:<{width}}  {latencies(one, slo)}, {kept(slo, one)}, "
        f"{output.count(one.requests, 'request')} since the start"
        for name, (one, slo) in by_class.items()
    ]


def latencies(live: "LiveReport", slo: "SloReport") -> str:
    """TTFT and TBT beside what is promised of them."""
    ttft, tbt = pair(live.ttft_ms, promised(slo, "ttft_ms")), pair(live.tbt_ms, promised(slo, "tbt_ms"))
    return f"TTFT {ttft}, TBT {tbt}"


def yielding(said: "SchedulerReport") -> list[str]:
    """Lines on the latencies whose largest promise is not kept, and on what rows do; none where all are kept."""
    paused = said.online.paused_for
    late = dict.fromkeys([*said.online.held_back, *paused])
    if not late:
        return []
    from conserve.cli.too_tight import why_broken
    from conserve.names import DEFAULT_HARM as HARM

    told, others, pausing = list[str](), list[str](), list[str]()
    for latency in late:
        name = latency.removesuffix("_ms").upper()
        largest_ms = max(promises_of(said, latency).values(), default=None)  # rows yield for that one
        why = why_broken(latency, largest_ms, said.alone, paused=latency in paused)
        if why is None:
            (pausing if latency in paused else others).append(name)
        else:
            told.append(f"  {name} of {largest_ms:g} ms cannot be kept: {why}")
    if pausing:
        their, them = ("its SLO", "it") if len(pausing) == 1 else ("their SLOs", "them")
        told.append(
            f"  rows pause for {' and '.join(pausing)}: they made more late than {their} "
            f"allow{'s' * (len(pausing) == 1)}; raise {them}, or add a server"
        )
    if others:
        one = "which is late too often to keep its SLO; raise it"
        which = one if len(others) == 1 else "which are late too often; raise the SLOs"
        told.append(
            f"  rows add about {HARM:.0%} at most to {' and '.join(others)}, {which}, or add a server"
        )
    return [output.coloured(line, "red") for line in told]


def on_the_way(ways_ms: "ByLatency[dict[str, float]]") -> list[str]:
    """Line on the way from the engine to clients; none below a millisecond."""
    later = [
        f"{latency.removesuffix('_ms').upper()} {name} {ms:,.0f} ms"
        for latency, ways in ways_ms.items()
        for name, ms in ways.items()
        if round(ms) >= 1
    ]
    return [f"  clients  {', '.join(later)} later than the engine, which plans for it"] if later else []


def promises_of(said: "SchedulerReport", latency: str) -> dict[str, float]:
    """All that is promised of a latency to the traffic that is late, the smallest time of each name."""
    by_class = (said.classes or {}).values()
    late = [one.slo for one in by_class if latency in (*one.held_back, *one.paused_for)]
    found: dict[str, float] = {}
    for slo in late or [said.slo]:
        for name, ms in slo.promises.of(latency).items():
            found[name] = min(ms, found.get(name, ms))
    return found


def harmed(said: "HarmReport") -> list[str]:
    """Line on the harm that was measured in pauses of the rows; none before the first one."""
    if not said.pauses:
        return []
    parts = [
        f"{latency.removesuffix('_ms').upper()} {name} {ratio(one)}"
        for latency, quantiles in said.items()
        for name, one in quantiles.items()
        if one is not None
    ]
    pauses = output.count(said.pauses, "pause")
    return [f"  harm     {', '.join(parts) or 'no latency to compare yet'} ({pauses} of rows)"]


def found(said: "PrefixesReport") -> list[str]:
    """Line on what live prompts found in the prefix cache and lost to rows; none where they share nothing."""
    if not said.found_tokens + said.lost_tokens:
        return []
    shares = [tokens / said.prompt_tokens for tokens in (said.found_tokens, said.lost_tokens)]
    return [
        f"  prefixes {shares[0]:.0%} of live prompts' tokens found in the cache, {shares[1]:.1%} lost to rows"
    ]


def pushed(said: "PushingReport") -> list[str]:
    """Line on rows of jobs that would be late; none on a server that lets them push nothing."""
    if said.largest_slo_scale == 1:
        return []
    rows = f"{output.count(said.rows, 'row')} up to x{said.largest_slo_scale:g} of what is promised"
    return [f"  push     {rows}, {said.tokens:,} tokens beyond it since the start"]


def ratio(one: "RatioReport") -> str:
    """Latency with rows over latency without, and its interval once it has one."""
    between = "" if one.low is None else f" [{one.low:.2f}, {one.high:.2f}]"
    return f"x{one.ratio:.2f}{between}"


def predicted(said: "SchedulerReport") -> str:
    """Line on the latency model and its error."""
    model = said.latency_model
    if model is None:
        held = said.policy == "online-only"
        return "  no latency model" + ("" if held else ": no SLO is kept until there is one")
    off = model.off
    seen = ", no iteration compared yet"
    if off.iterations:
        iterations = output.count(off.iterations, "iteration")
        seen = f", off by {off.p50:.0%}, P99 {off.p99:.0%}, of the last {iterations}"
    return f"  model    {model.name} from the {model.source}{seen}"


def left(said: "PreemptionReport", offline_tokens: float) -> str:
    """Line on the iterations that rows left for arrivals."""
    if said.policy == "off":
        return f"  rows leave no iteration{f': {said.why_off}' if said.why_off else ''}"
    redone, p99_ms = said.tokens_redone, said.reaction_ms.p99
    parts = [f"rows left {output.count(said.iterations_left, 'iteration')}"]
    if redone:
        share = f" ({redone / offline_tokens:.1%} of offline tokens)" if offline_tokens else ""
        parts.append(output.count(redone, "token") + " redone" + share)
    if p99_ms is not None:
        parts.append(f"reaction P99 {p99_ms:,.0f} ms")
    return f"  since the start {', '.join(parts)}"


def checkpointed(said: "CheckpointReport") -> list[str]:
    """Lines on restored and recomputed KV of evicted rows, and on the KV spill; none without checkpoints."""
    spilled = from_disk(said.spill)
    parts = []
    if said.policy != "off":
        parts = [f"{said.tokens_saved:,} saved", f"{said.tokens_restored:,} restored"]
    elif said.why_off:
        return [f"  no KV checkpoints: {said.why_off}"]
    if not parts and not said.tokens_recomputed:
        return spilled
    parts.append(f"{said.tokens_recomputed:,} recomputed")
    if said.blocks_failed:
        parts.append(f"{output.count(said.blocks_failed, 'block')} not copied")
    if said.blocks_refused:
        parts.append(f"{output.count(said.blocks_refused, 'block')} beyond host memory")
    return [f"  tokens of KV {', '.join(parts)}", *spilled]


def from_disk(said: "SpillReport | None") -> list[str]:
    """Line on the KV that the last engine left on disk (`--kv-spill`); none without one."""
    if said is None:
        return []
    if said.tokens_taken_in:
        return [f"  {output.count(said.tokens_taken_in, 'token')} of KV from disk"]
    if why := said.why_off or said.refused:
        return [f"  nothing from disk: {why}"]
    return []


def pair(latency: "Quantiles", of: str = "") -> str:
    """P50 and P99 beside the promises, in ms."""
    if latency.p50 is None or latency.p99 is None:
        return "-"
    return f"{latency.p50:,.0f}/{latency.p99:,.0f}{of} ms"


def promised(slo: "SloReport", latency: str) -> str:
    """The promises of one latency; a P99 alone without its name."""
    bounds = slo.promises.of(latency)
    if set(bounds) == {"p99"}:
        return f" of {bounds['p99']:,.0f}"
    named = ", ".join(f"{quantile} {ms:,.0f}" for quantile, ms in bounds.items())
    return f" of {named}" if named else ""


def kept(slo: "SloReport", online: "LiveReport") -> str:
    """Promises that are broken if some are not of a P99, the SLO attainment, the largest harm promised, or none."""
    promises = [
        (f"{latency.removesuffix('_ms').upper()} {quantile}", one.kept)
        for latency, bounds in online.promises.items()
        for quantile, one in bounds.items()
    ]
    broken = [name for name, is_kept in promises if not is_kept]
    if broken and any(not name.endswith(" p99") for name, _ in promises):
        return output.coloured(f"promise broken: {', '.join(broken)}", "red")
    if slo.ttft_ms is None and slo.tbt_ms is None:
        return "no promise" if slo.harm is None else f"rows add at most about {slo.harm:.0%}"
    return attained(online.attainment) if online.measured else "SLO kept -"


def attained(share: float) -> str:
    """SLO attainment, red once it is below 99 %."""
    return output.coloured(f"SLO kept {share:.1%}", "red" if share < 0.99 else None)
