"""Flags of `conserve bench`, checked: SLO, tolerance and design of the comparison."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from conserve.cli.serve_flags import milliseconds
from conserve.engine.policy.checkpointing import ADAPTIVE
from conserve.errors import SettingsError
from conserve.names import ONLINE_ONLY, PROMPT

if TYPE_CHECKING:
    from conserve.bench.attainment import LatencyLimits
    from conserve.bench.compare import Design
    from conserve.bench.presets import Preset
    from conserve.bench.slo_search import Promise

MEAN_OF = 1000  # offline rows, for the mean one


def refuse_own(words: Sequence[str], offline: str | None, kv_checkpoint: str) -> None:
    """Raise for what a server that runs already has of its own, and a comparison on it cannot set."""
    if offline is not None:
        raise SettingsError(
            "--offline goes with a server of the benchmark's own; submit rows to that one's queue"
        )
    if kv_checkpoint != ADAPTIVE:
        raise SettingsError(
            f"--kv-checkpoint {kv_checkpoint} goes with a server of the benchmark's own; start that one with it, "
            "or compare conserve/recompute"
        )
    if words:
        raise SettingsError(
            f"--endpoint names a server with a model and flags of its own; leave out: {shlex.join(words)}"
        )


def resized(preset: "Preset", rounds: int | None, block_s: float | None, offline: str | None) -> "Preset":
    """Preset with the values that the command line gives."""
    said = {
        "rounds": rounds,
        "block_s": block_s,
        "offline_lengths": lengths(offline) if offline is not None else None,
    }
    return replace(preset, **{name: value for name, value in said.items() if value is not None})  # type: ignore[arg-type]


def lengths(text: str) -> tuple[int, int]:
    """Tokens of an offline row's prompt and of its answer."""
    found = [int(part) for part in text.split(",") if part.isdecimal() and int(part)]
    if len(found) != 2 or text.count(",") != 1:
        raise SettingsError(f"--offline takes two whole numbers of tokens, IN,OUT, not {text!r}")
    return found[0], found[1]


def row_lengths(preset: "Preset", seed: int) -> list[tuple[int, int]]:
    """Tokens of prompt and answer of as many offline rows as the mean row is taken from."""
    from conserve.bench.offline import lengths_of

    return list(lengths_of(replace(preset, offline_rows=MEAN_OF), seed))


def limits(ttft_slo: str | None, tbt_slo: str | None) -> "LatencyLimits | None":
    """SLO of the flags, if they give one."""
    from conserve.bench.attainment import LatencyLimits

    if (ttft_slo is None) != (tbt_slo is None):
        raise SettingsError("give --ttft-slo and --tbt-slo together, or neither for online-only's P99s")
    ttft_ms, tbt_ms = milliseconds("--ttft-slo", ttft_slo), milliseconds("--tbt-slo", tbt_slo)
    return LatencyLimits(ttft_ms, tbt_ms) if ttft_ms is not None and tbt_ms is not None else None


def promised(tolerance: str | None, slo_scale: float) -> "Sequence[Promise]":
    """Latencies that the tuned baselines keep: those given, or both P99s as far as `slo_scale` goes."""
    from conserve.bench.slo_search import DEFAULT, LEAST, MOST, promises

    if tolerance is not None:
        return promises(tolerance)
    return [one._replace(tolerance=min(MOST, max(LEAST, slo_scale - 1))) for one in DEFAULT]


def known_profiler(name: str) -> "Literal['forecast', 'engine']":
    """Place of the test runs, by its name; raises `SettingsError`."""
    if name == "forecast":
        return "forecast"
    if name == "engine":
        return "engine"
    raise SettingsError(f"there is no profiler {name!r}; there are forecast and engine")


def make_design(
    preset: "Preset", policies: list[str], slo: "LatencyLimits | None", slo_scale: float, seed: int
) -> "Design":
    """Design of the comparison, from the flags."""
    from conserve.bench.compare import Design
    from conserve.bench.names import alone_of

    if slo_scale <= 0:
        raise SettingsError(f"--slo-scale {slo_scale:g} is no SLO; give a number above 0")
    if slo is None and alone_of(policies) is None:
        raise SettingsError(
            f"without {ONLINE_ONLY} there is no SLO; add it to --policies, or give --ttft-slo and --tbt-slo"
        )
    return Design(
        policies=policies,
        rounds=preset.rounds,
        block_s=preset.block_s,
        slo=slo,
        slo_scale=slo_scale,
        seed=seed,
        preemption=PROMPT,
        load_cores=preset.other_cores,
    )
