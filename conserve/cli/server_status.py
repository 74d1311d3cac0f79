"""Lines of `conserve status` on the servers that run over this store."""

from typing import Any

from conserve.api.servers import ASKED_AT_ONCE, STOCK, aged, ask
from conserve.cli import output
from conserve.config import Settings
from conserve.jobs.harvest.services import running


def read_servers(settings: Settings) -> list[dict[str, Any]]:
    """Answer of each server's `GET /v1/conserve`; its address alone if it does not answer."""
    urls = [server.url for server in running(settings)]
    if not urls:  # the usual case: status imports nothing for it
        return []
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        answers = pool.map(lambda url: ask(url, settings), urls)
        return [{"url": url, **said} for url, said in zip(urls, answers, strict=True)]


def lines(servers: list[dict[str, Any]]) -> list[str]:
    """Lines on each server: online, offline, latency model, prefixes, iterations that rows left, checkpoints."""
    shown: list[str] = []
    for server in servers:
        if "error" in server:
            shown.append(f"{server['url']}  {server['error']}")
            continue
        if server.get(STOCK):
            shown.append(headed(server["url"], "  runs another scheduler"))
            continue
        from conserve.engine.policy.policies import kept_promises

        online, offline, policy = server["online"], server["offline"], server["policy"]
        by_class = {
            name: {**one, "slo": kept_promises(one["slo"], policy)}
            for name, one in server.get("classes", {}).items()
        }
        shown += [
            headed(server["url"], f"  policy {policy}, last minute{until(server)}:"),
            online_line(online, kept_promises(server["slo"], policy), classified="classes" in server),
            *classes(by_class),
            *yielding(server),
            *on_the_way(online.get("way_ms", {})),
            f"  offline  {offline['tokens_per_s']:,.0f} tokens/s",
            *harmed(server.get("harm")),
            *found(server.get("live_prefixes")),
            *pushed(server.get("pushing")),
            *predicted(server),
            *left(server.get("preemption"), offline["tokens"]),
            *checkpointed(server.get("checkpoint")),
        ]
    return [*shown, ""] if shown else []


def headed(url: str, words: str) -> str:
    """Line on a server, its address shortened as far as a terminal is too narrow."""
    room = output.width()
    most = len(url) if room is None else max(output.LEAST, room - output.places(words))
    return f"{output.shortened(url, most)}{words}"


def until(server: dict[str, Any]) -> str:
    """When the last minute ended, if that is not now."""
    ago = aged(server.get("age_s"))
    return f" until {ago}" if ago is not None else ""


def online_line(online: dict[str, Any], slo: dict[str, Any], *, classified: bool) -> str:
    """Line on all live requests; where they have classes, the promises stand beside each class."""
    if classified:
        return f"  online   TTFT {pair(online['ttft_ms'], '')}, TBT {pair(online['tbt_ms'], '')}"
    return (
        f"  online   TTFT {pair(online['ttft_ms'], promised(slo, 'ttft_ms'))}, "
        f"TBT {pair(online['tbt_ms'], promised(slo, 'tbt_ms'))}, {kept(slo, online)}"
    )


def classes(by_class: dict[str, Any]) -> list[str]:
    """A line on each class of live traffic, indented below the line on all of them."""
    width = max(map(len, by_class), default=0)
    return [
        f"    {name:<{width}}  TTFT {pair(one['ttft_ms'], promised(one['slo'], 'ttft_ms'))}, "
        f"TBT {pair(one['tbt_ms'], promised(one['slo'], 'tbt_ms'))}, {kept(one['slo'], one)}, "
        f"{output.count(one['requests'], 'request')} since the start"
        for name, one in by_class.items()
    ]


def yielding(server: dict[str, Any]) -> list[str]:
    """Lines on the latencies whose largest promise is not kept, and on what rows do; none where all are kept."""
    paused = server["online"].get("paused_for", ())
    late = dict.fromkeys([*server["online"].get("held_back", ()), *paused])
    if not late:
        return []
    from conserve.cli.too_tight import why_broken
    from conserve.names import DEFAULT_HARM as HARM

    said, others, pausing = list[str](), list[str](), list[str]()
    for latency in late:
        name = latency.removesuffix("_ms").upper()
        largest_ms = max(promises_of(server, latency).values(), default=None)  # rows yield for that one
        why = why_broken(latency, largest_ms, server.get("alone"), paused=latency in paused)
        if why is None:
            (pausing if latency in paused else others).append(name)
        else:
            said.append(f"  {name} of {largest_ms:g} ms cannot be kept: {why}")
    if pausing:
        their, them = ("its SLO", "it") if len(pausing) == 1 else ("their SLOs", "them")
        said.append(
            f"  rows pause for {' and '.join(pausing)}: they made more late than {their} "
            f"allow{'s' * (len(pausing) == 1)}; raise {them}, or add a server"
        )
    if others:
        one = "which is late too often to keep its SLO; raise it"
        which = one if len(others) == 1 else "which are late too often; raise the SLOs"
        said.append(
            f"  rows add about {HARM:.0%} at most to {' and '.join(others)}, {which}, or add a server"
        )
    return [output.coloured(line, "red") for line in said]


def on_the_way(ways_ms: dict[str, dict[str, float]]) -> list[str]:
    """Line on the way from the engine to clients; none below a millisecond, and from an older server."""
    later = [
        f"{latency.removesuffix('_ms').upper()} {name} {ms:,.0f} ms"
        for latency, ways in ways_ms.items()
        for name, ms in ways.items()
        if round(ms) >= 1
    ]
    return [f"  clients  {', '.join(later)} later than the engine, which plans for it"] if later else []


def promises_of(server: dict[str, Any], latency: str) -> dict[str, float]:
    """All that is promised of a latency to the traffic that is late, the smallest time of each name."""
    late = [
        one["slo"]
        for one in server.get("classes", {}).values()
        if latency in one.get("held_back", ()) or latency in one.get("paused_for", ())
    ]
    found: dict[str, float] = {}
    for slo in late or [server["slo"]]:
        for name, ms in bounds_of(slo, latency).items():
            if ms is not None:
                found[name] = min(ms, found.get(name, ms))
    return found


def harmed(said: dict[str, Any] | None) -> list[str]:
    """Line on the harm that was measured in pauses of the rows; none before the first one."""
    if said is None or not said["pauses"]:
        return []
    parts = [
        f"{latency.removesuffix('_ms').upper()} {name} {ratio(one)}"
        for latency in ("ttft_ms", "tbt_ms")
        for name, one in said[latency].items()
        if one is not None
    ]
    pauses = output.count(said["pauses"], "pause")
    return [f"  harm     {', '.join(parts) or 'no latency to compare yet'} ({pauses} of rows)"]


def found(said: dict[str, Any] | None) -> list[str]:
    """Line on what live prompts found in the prefix cache and lost to rows; none where they share nothing."""
    if said is None or not said["found_tokens"] + said["lost_tokens"]:
        return []
    shares = [said[name] / said["prompt_tokens"] for name in ("found_tokens", "lost_tokens")]
    return [
        f"  prefixes {shares[0]:.0%} of live prompts' tokens found in the cache, {shares[1]:.1%} lost to rows"
    ]


def pushed(said: dict[str, Any] | None) -> list[str]:
    """Line on rows of jobs that would be late; none on a server that lets them push nothing."""
    if said is None or said["largest_slo_scale"] == 1:
        return []
    rows = f"{output.count(said['rows'], 'row')} up to x{said['largest_slo_scale']:g} of what is promised"
    return [f"  push     {rows}, {said.get('tokens', 0):,} tokens beyond it since the start"]


def ratio(one: dict[str, float | None]) -> str:
    """Latency with rows over latency without, and its interval once it has one."""
    between = "" if one["low"] is None else f" [{one['low']:.2f}, {one['high']:.2f}]"
    return f"x{one['ratio']:.2f}{between}"


def predicted(server: dict[str, Any]) -> list[str]:
    """Line on the latency model and its error; none for an older server."""
    if "latency_model" not in server:
        return []
    model = server["latency_model"]
    if model is None:
        held = server["policy"] == "online-only"
        return ["  no latency model" + ("" if held else ": no SLO is kept until there is one")]
    if "source" not in model:
        return []
    off = model["off"]
    share = f", off by {off['p50']:.0%}, P99 {off['p99']:.0%}, of the last" if off["iterations"] else ""
    seen = (
        f"{share} {output.count(off['iterations'], 'iteration')}" if share else ", no iteration compared yet"
    )
    return [f"  model    {model['name']} from the {model['source']}{seen}"]


def left(said: dict[str, Any] | None, offline_tokens: float) -> list[str]:
    """Line on the iterations that rows left for arrivals; none if the server says nothing of them."""
    if said is None:
        return []
    if said["policy"] == "off":
        return [
            f"  rows leave no iteration: {said['why_off']}"
            if said["why_off"]
            else "  rows leave no iteration"
        ]
    redone, p99_ms = said["tokens_redone"], said["reaction_ms"]["p99"]
    iterations = said.get("iterations_left", said.get("preemptions", 0))  # the latter from an older server
    parts = [f"rows left {output.count(iterations, 'iteration')}"]
    if redone:
        share = f" ({redone / offline_tokens:.1%} of offline tokens)" if offline_tokens else ""
        parts.append(output.count(redone, "token") + " redone" + share)
    if p99_ms is not None:
        parts.append(f"reaction P99 {p99_ms:,.0f} ms")
    return [f"  since the start {', '.join(parts)}"]


def checkpointed(said: dict[str, Any] | None) -> list[str]:
    """Lines on restored and recomputed KV of evicted rows, and on the KV spill; none without checkpoints."""
    if said is None:
        return []
    spilled = from_disk(said.get("spill"))
    parts = []
    if said["policy"] != "off":
        parts = [f"{said['tokens_saved']:,} saved", f"{said['tokens_restored']:,} restored"]
    elif said["why_off"]:
        return [f"  no KV checkpoints: {said['why_off']}"]
    if not parts and not said["tokens_recomputed"]:
        return spilled
    parts.append(f"{said['tokens_recomputed']:,} recomputed")
    failed, refused = said.get("blocks_failed", 0), said.get("blocks_refused", 0)
    if failed:
        parts.append(f"{output.count(failed, 'block')} not copied")
    if refused:
        parts.append(f"{output.count(refused, 'block')} beyond host memory")
    return [f"  tokens of KV {', '.join(parts)}", *spilled]


def from_disk(said: dict[str, Any] | None) -> list[str]:
    """Line on the KV that the last engine left on disk (`--kv-spill`); none without one."""
    if said is None:
        return []
    if said["tokens_taken_in"]:
        return [f"  {output.count(said['tokens_taken_in'], 'token')} of KV from disk"]
    if why := said["why_off"] or said["refused"]:
        return [f"  nothing from disk: {why}"]
    return []


def pair(latency: dict[str, float | None], of: str) -> str:
    """P50 and P99 beside the promises, in ms."""
    if latency["p50"] is None or latency["p99"] is None:
        return "-"
    return f"{latency['p50']:,.0f}/{latency['p99']:,.0f}{of} ms"


def bounds_of(slo: dict[str, Any], latency: str) -> dict[str, float | None]:
    """All promises of a latency in one report; an older server tells its P99 alone."""
    return slo.get("promises", {}).get(latency) or {"p99": slo[latency]}


def promised(slo: dict[str, Any], name: str) -> str:
    """The promises of one latency; a P99 alone without its name."""
    bounds = bounds_of(slo, name)
    if set(bounds) == {"p99"}:
        return f" of {bounds['p99']:,.0f}" if bounds["p99"] is not None else ""
    return " of " + ", ".join(f"{quantile} {ms:,.0f}" for quantile, ms in bounds.items())


def kept(slo: dict[str, Any], online: dict[str, Any]) -> str:
    """Promises that are broken if some are not of a P99, the SLO attainment, the largest harm promised, or none."""
    promises = [
        (f"{name.removesuffix('_ms').upper()} {quantile}", one["kept"])
        for name, bounds in online.get("promises", {}).items()
        for quantile, one in bounds.items()
    ]
    broken = [name for name, is_kept in promises if not is_kept]
    if broken and any(not name.endswith(" p99") for name, _ in promises):
        return output.coloured(f"promise broken: {', '.join(broken)}", "red")
    if slo["ttft_ms"] is None and slo["tbt_ms"] is None:
        harm = slo.get("harm")
        return "no promise" if harm is None else f"rows add at most about {harm:.0%}"
    return attained(online["attainment"]) if measured(online) else "SLO kept -"


def measured(online: dict[str, Any]) -> bool:
    """True if there was a latency to measure, without which the attainment of an SLO is 1."""
    return any(online.get(name, {}).get("p99") is not None for name in ("ttft_ms", "tbt_ms"))


def attained(share: float) -> str:
    """SLO attainment, red once it is below 99 %."""
    return output.coloured(f"SLO kept {share:.1%}", "red" if share < 0.99 else None)
