"""Live arrivals of a comparison, from the words of its command line: a trace, a Gamma process, ON/OFF phases."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from conserve.bench import traces
from conserve.bench.compare import Source
from conserve.bench.presets import Preset
from conserve.bench.sizing import Offered
from conserve.bench.traces import Trace
from conserve.errors import SettingsError


def arrivals(
    preset: Preset,
    trace: str | None,
    gamma: str | None,
    on_off: str | None,
    rate: float | None,
    speed: float | None,
    lengths: float | None,
    seed: int,
    *,
    given: Mapping[str, Any],
) -> Offered:
    """Arrivals of the command line; raises `SettingsError`.

    Exactly one of `trace` (a file or a bundled name), `gamma` (`RATE,CV,IN,OUT`) and `on_off`
    (`RATE,ON_S,OFF_S,IN,OUT`) is given; `rate` in requests/s. `given` are other settings by name, None for each
    that is left to the preset.
    """
    if sum(kind is not None for kind in (trace, gamma, on_off)) != 1:
        raise SettingsError("say what arrives: one of --trace FILE, --gamma RATE,CV,IN,OUT and --on-off ...")
    if trace is None and (rate is not None or speed is not None or lengths is not None):
        raise SettingsError(
            "--rate, --speed and --lengths change a trace; other arrivals say theirs themselves"
        )
    for flag, value in (("--rate", rate), ("--speed", speed), ("--lengths", lengths)):
        if value is not None and not 0 < value < inf:
            raise SettingsError(f"{flag} {value:g} plays nothing; give a number above 0")
    if rate is not None and speed is not None:
        raise SettingsError("--rate and --speed both set the rate; give one of them")
    fixed = {name for name, value in given.items() if value is not None}
    fixed |= {"lengths"} if lengths is not None else set()
    if trace is not None:
        found = of_trace(preset, trace, rate, speed, seed)
    elif gamma is not None:
        found = of_gamma(gamma, seed)
    else:
        found = of_on_off(on_off or "", seed)
    return replace(found, given=found.given | fixed, lengths=lengths or 1.0)


def of_trace(preset: Preset, name: str, rate: float | None, speed: float | None, seed: int) -> Offered:
    """Arrivals of a trace: thinned to a rate if the preset thins it, otherwise stretched in time."""
    whole = traces.read(traces.find_trace(name), seed=seed)
    if speed is not None or (rate is not None and preset.rate is None):
        offered = of_stretched(whole, rate, speed)
    elif preset.rate is not None:
        offered = of_thinned(whole, rate, preset.rate, seed)
    else:
        offered = of_whole(whole, preset, seed)
    given: frozenset[str] = frozenset() if rate is None else frozenset({"rate"})
    offered = replace(offered, name=f"--trace {name}", given=given, on_ticks=whole.on_ticks)
    if rate is not None and rate > (most := offered.most(preset.block_s)):
        raise SettingsError(
            f"--rate {rate:g} is more than {name} has: {len(whole):,} requests, {most:g} a second in blocks of "
            f"{preset.block_s:g} s; give at most that, or a shorter --block-s"
        )
    return offered


def of_thinned(whole: Trace, rate: float | None, usual: float, seed: int) -> Offered:
    """A trace of which each block plays all its time, thinned to this rate; without one, to the preset's."""

    def source(preset: Preset, wanted: float | None) -> Source:
        thinned = replace(preset, rate=wanted or rate or preset.rate)
        return lambda number: thinned.arrivals(whole, seed + number)

    return Offered(
        name="",
        source=source,
        flags=rate_flag,
        sizable=True,
        rate=rate or usual,
        trace_s=whole.duration_s,
        requests=len(whole),
    )


def of_whole(whole: Trace, preset: Preset, seed: int) -> Offered:
    """A trace that each block plays whole, as fast as that takes."""

    def source(preset: Preset, wanted: float | None) -> Source:
        if wanted is not None:
            return in_parts(whole.at_rate(wanted), preset)
        return lambda number: preset.arrivals(whole, seed + number)

    rate = len(whole) / preset.block_s
    return Offered(name="", source=source, flags=rate_flag, rate=rate, trace_s=whole.duration_s)


def of_stretched(whole: Trace, rate: float | None, speed: float | None) -> Offered:
    """A trace at a rate or a speed, of which the blocks play one part after the other."""

    def source(preset: Preset, wanted: float | None) -> Source:
        at = wanted or rate
        return in_parts(whole.scaled(speed or 1.0) if at is None else whole.at_rate(at), preset)

    usual = whole.rate * (speed or 1.0)

    def flags(wanted: float) -> str:
        if speed is None:
            return rate_flag(wanted)
        return f"--speed {speed:.12g}" if wanted == usual else f"--speed {wanted / whole.rate:.3g}"

    return Offered(name="", source=source, flags=flags, rate=rate or usual)


def rate_flag(rate: float) -> str:
    """The flag that sets this rate."""
    return f"--rate {rate:.12g}"


def of_gamma(text: str, seed: int) -> Offered:
    """Arrivals of a Gamma process."""
    per_s, cv, prompt, answer = numbers("--gamma", text, 4)

    def source(preset: Preset, rate: float | None) -> Source:
        return lambda number: traces.gamma(
            rate or per_s, cv, preset.block_s, int(prompt), int(answer), seed + number
        )

    rest = text.partition(",")[2]
    return Offered(name="", source=source, flags=lambda rate: f"--gamma {rate:g},{rest}", rate=per_s)


def of_on_off(text: str, seed: int) -> Offered:
    """Arrivals of ON/OFF phases; the rate is that of the ON phases."""
    per_s, on_s, off_s, prompt, answer = numbers("--on-off", text, 5)

    def source(preset: Preset, rate: float | None) -> Source:
        return lambda number: traces.on_off(
            rate or per_s, on_s, off_s, preset.block_s, int(prompt), int(answer), seed + number
        )

    rest = text.partition(",")[2]
    return Offered(name="", source=source, flags=lambda rate: f"--on-off {rate:g},{rest}", rate=per_s)


def in_parts(trace: Trace, preset: Preset) -> Source:
    """Parts of the trace, one for each block."""
    return lambda number: nth_part(trace, number, preset)


def nth_part(trace: Trace, number: int, preset: Preset) -> Trace:
    """Part of the trace for block `number`; after its end the trace begins again."""
    part = trace.looped(number * preset.block_s, preset.block_s)
    return part.shortened(preset.input_factor, preset.output_factor, max_input=preset.longest * 3 // 4)


def numbers(flag: str, text: str, count: int) -> list[float]:
    """Parse `count` positive, finite numbers with commas between; raises `SettingsError`."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != count or not all(0 < value < inf for value in found):
        raise SettingsError(f"{flag} takes {count} positive numbers with commas between, not {text!r}")
    return found
