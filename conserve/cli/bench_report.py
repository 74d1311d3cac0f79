"""Output of `conserve bench`: tables on the terminal, and a folder with the page and the raw numbers."""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from conserve.cli import exits, output
from conserve.engine.runtime.machine import compute_threads, cpu_model, gpu_models
from conserve.engine.vllm.compat.installed import installed_engine
from conserve.errors import ConserveError
from conserve.names import CONSERVE

if TYPE_CHECKING:
    from conserve.bench.attainment import LatencyLimits
    from conserve.bench.compare import Design
    from conserve.bench.measure import Block, PolicyComparison
    from conserve.bench.playing import Measurement
    from conserve.bench.sizing import Sized


def conclude(
    measurement: "Measurement",
    folder: Path,
    said: Mapping[str, str],
    *,
    as_json: bool,
    failed: ConserveError | None = None,
) -> int:
    """Report the measured blocks, if there are any; returns the exit code.

    `failed` is the error that ended the comparison, said last.
    """
    if measurement.sized is None or not measurement.blocks:
        output.say("stopped before the first block was measured: there is no page")
        return exits.INTERRUPTED
    from conserve.bench.compare import slo_of

    design = measurement.sized.design
    slo = slo_of(design, measurement.blocks)
    stopped = missing(measurement.blocks, design)
    if stopped and failed is not None:
        stopped += f" The cause: {failed}"
    said = {**facts(design, slo), **played(measurement, measurement.sized), **said}
    report(measurement, design, folder, said, slo=slo, stopped=stopped, as_json=as_json)
    if failed is not None:
        return output.say_error(failed)
    return exits.INTERRUPTED if stopped else exits.DONE


def missing(blocks: Sequence["Block"], design: "Design") -> str | None:
    """Sentence on the blocks that were not measured; None if all were."""
    if len(blocks) == design.blocks:
        return None
    counts = Counter(block.policy for block in blocks)
    each = ", ".join(f"{counts[policy]} of {policy}" for policy in design.policies)
    return f"Stopped after {len(blocks)} of {design.blocks} blocks: {each}."


def report(
    measurement: "Measurement",
    design: "Design",
    folder: Path,
    said: Mapping[str, str],
    *,
    slo: "LatencyLimits | None",
    stopped: str | None,
    as_json: bool,
) -> None:
    """Print the tables, and write the page and the raw numbers into the folder.

    `said` are facts about the measurement; `slo` was promised to live requests; `stopped` says which blocks
    are missing, if any.
    """
    from conserve.bench import raw
    from conserve.bench.compare import relative
    from conserve.bench.measure import compare
    from conserve.bench.pages import report as reports

    placed = relative(measurement.blocks)
    comparison = with_rows(compare(placed, reference=design.slo, seed=design.seed), placed, measurement)
    document = {**comparison.document(), "design": {**said, **({"stopped": stopped} if stopped else {})}}
    raw.write(placed, folder)
    (folder / "comparison.json").write_text(json.dumps(document, indent=2))
    page = reports.page(comparison, placed, slo=slo, facts=said, stopped=stopped)
    (folder / "page.html").write_text(page)
    if as_json:
        output.data_json(document)
    else:
        show(comparison, "" if measurement.engine and measurement.lengths else f"rows: {said['rows']}")
    if stopped:
        output.say(stopped)
    output.say(f"the page: {folder / 'page.html'}")


def with_rows(
    comparison: "PolicyComparison", blocks: Sequence["Block"], measurement: "Measurement"
) -> "PolicyComparison":
    """The comparison with rows beside all live work, where the engine's latency model can price that work."""
    from conserve.bench import beside

    if measurement.engine is None:
        return comparison
    return beside.with_rows(comparison, blocks, measurement.engine, measurement.lengths)


def show(comparison: "PolicyComparison", unknown: str = "") -> None:
    """Print the answer, then the tables and sentences behind it; `unknown` says which rows are not told."""
    from conserve.bench.pages import report as reports
    from conserve.bench.pages import verdict

    output.data(f"{verdict.sentence(comparison)}\n")
    table, shares = reports.table_rows(comparison), reports.attainment_rows(comparison)
    output.data("\n".join(output.columns(tuple(table.header), table.rows, right=range(1, len(table.header)))))
    if shares.rows:
        output.data(f"\nSLO attainment, by scale of {reports.reference_words(comparison)}")
        output.data(
            "\n".join(output.columns(tuple(shares.header), shares.rows, right=range(1, len(shares.header))))
        )
    for line in (
        *reports.receipts(comparison),
        *reports.warnings(comparison),
        *([unknown] if unknown else ()),
    ):
        output.data(f"\n{line}")


def facts(design: "Design", slo: "LatencyLimits | None") -> dict[str, str]:
    """Facts that stand beside every figure: machine, versions, commit, seed, arrivals, SLO."""
    import platform

    from conserve import __version__
    from conserve.bench.cores import AT_START
    from conserve.bench.pages.report import limits_words

    return {
        "machine": f"{platform.machine()}, {output.count(AT_START, 'core')}",
        "version": __version__,
        "measured": time.strftime("%Y-%m-%d %H:%M"),
        "policies": ", ".join(design.policies),
        **({"preemption": design.preemption} if CONSERVE in design.policies else {}),
        "blocks": f"{design.rounds} of {design.block_s:g} s",
        "seed": str(design.seed),
        "SLO": ("given" if design.slo else f"{design.slo_scale:g} x online-only's P99s")
        + (f": {limits_words(slo)}" if slo else ""),
    }


def measured_with(*, simulated: bool) -> str:
    """Versions that cells of a sweep are measured with now, and the machine unless its time is simulated."""
    from conserve import __version__

    engine = installed_engine()
    words = [f"ConServe {__version__}", *([f"{engine.distribution} {engine.version}"] if engine else [])]
    if not simulated:
        gpus = "" if engine is None or engine.computes_on_cpu else gpu_models()
        words.append(gpus or f"{cpu_model()}, {output.count(compute_threads(), 'core')}")
    return ", ".join(words)


def played(measurement: "Measurement", sized: "Sized") -> dict[str, str]:
    """Facts for the report: the arrivals, the flags that play them again, the expected load."""
    offered = measurement.offered
    return {
        "model": measurement.model,
        "arrivals": f"{offered.name} {sized.flags(offered, sized.rate)}".strip(),
        "set by": "the machine's speed" if sized.chosen else "the command line",
        **({"expected": sized.sentence()} if sized.forecasts else {}),
        **({"latency model": measurement.engine.description()} if measurement.engine else {}),
        **({"tuned": "; ".join(measurement.tuned)} if measurement.tuned else {}),
        "rows": rows_words(measurement),
    }


def rows_words(measurement: "Measurement") -> str:
    """Words for the rows that policies are compared by, and for what is not known of them."""
    if measurement.engine is None:
        return (
            "not told beside all live work, since the server tells no latency model; tokens/s and work/s are as "
            "counted when a block's time was over, which favours policies that let live requests wait"
        )
    if measurement.lengths is None:
        return "the server's own, of unknown lengths: the rows ratio is of work/s, beside all live work"
    prompts, answers = (
        sum(tokens) / len(measurement.lengths) for tokens in zip(*measurement.lengths, strict=True)
    )
    return f"{prompts:,.0f} tokens of prompt and {answers:,.0f} of answer on average, beside all live work"
