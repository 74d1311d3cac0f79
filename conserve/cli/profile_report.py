"""A latency profile as text or JSON: its range, errors, coefficients, and a table of predicted times."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from conserve.cli import output

if TYPE_CHECKING:
    from conserve.profiles.correction import Correction
    from conserve.profiles.profile import Profile

TABLE_TOKENS = (128, 512, 2048)
TABLE_CONTEXTS = (0, 1024, 4096, 16_384, 40_960)


def show_profile(
    profile: "Profile", learned: "Correction | None", others: "Sequence[Profile]", *, as_json: bool
) -> None:
    """Print the profile as text or JSON; `others` of the same machine separate k1 from k3."""
    if as_json:
        output.data_json(as_document(profile, learned))
        return
    for line in [
        *heading(profile),
        *correction_lines(learned),
        *split_lines(profile, others),
        "",
        *error_table(profile),
        "",
        *coefficient_table(profile),
    ]:
        output.data(line)
    if times := time_table(profile):
        output.data("")
        for line in times:
            output.data(line)
    for line in [*mechanism_lines(profile), *profile.derivation]:
        output.data(line)


def as_document(profile: "Profile", learned: "Correction | None") -> dict[str, Any]:
    """Profile as JSON, without samples and single residuals."""
    whole = asdict(profile)
    del whole["samples"]
    models = {
        name: {"coefficients": fitted.coefficients, **(asdict(fitted.errors) if fitted.errors else {})}
        for name, fitted in profile.models.items()
    }
    correction = (
        {
            "scale": learned.scale,
            "error": learned.error,
            "iterations": learned.seen,
            "coefficients": learned.coefficients,
        }
        if learned
        else None
    )
    return {
        **whole,
        "digest": profile.key.digest,
        "best": profile.best,
        "measured": asdict(profile.measured) if profile.measured is not None else None,
        "models": models,
        "correction": correction,
    }


def heading(profile: "Profile") -> list[str]:
    how = f"{profile.how} {profile.measured_at}".strip()
    size = f", {len(profile.samples)} batches in {profile.seconds:.0f} s" if profile.samples else ""
    lines = [f"{profile.name}: {how}{size}", profile.key.summary]
    if words := range_words(profile):
        lines.append(f"measured: {', '.join(words)}; longer iterations and contexts (~) are extrapolated")
    if profile.noise is not None:
        lines.append(
            f"noise of the machine: the same batch varies by {percent(profile.noise.back_to_back)} at once, "
            f"by {percent(profile.noise.over_time)} over the session"
        )
    return lines


def correction_lines(learned: "Correction | None") -> list[str]:
    """Lines on the correction that engines have learned while they ran on the profile."""
    if learned is None:
        return []
    how = (
        f"times are {learned.scale:.3f} of these"
        if learned.coefficients is None
        else "the model was fitted to them anew"
    )
    return [
        f"corrected since over {output.count(learned.seen, 'iteration')}: {how}, "
        f"recent error {percent(learned.error)}",
        *(["that is beyond correction; run: conserve profile MODEL"] if learned.out_of_bounds else []),
    ]


def split_lines(profile: "Profile", others: "Sequence[Profile]") -> list[str]:
    """Lines on k1 and k3, which profiles at several degrees of parallelism tell apart."""
    from conserve.profiles.parallelism import separate, siblings

    degrees = siblings(profile, others)
    if (split := separate(degrees)) is None:
        return []
    known = ", ".join(map(str, sorted(degrees)))
    return [f"k1 {split.k1:.4g} ms, k3 {split.k3:.4g} ms a token (from profiles at tensor-parallel {known})"]


def error_table(profile: "Profile") -> list[str]:
    """Table of errors on the batches that were held out of the fit."""
    rows = [
        [
            name + (" *" if name == profile.best else ""),
            percent(e.mape),
            percent(e.p50_error),
            percent(e.p90_error),
            percent(e.p99_error),
            f"{e.margin:.3f}",
            percent(e.overrun_share),
            str(e.batches),
        ]
        for name, fitted in profile.models.items()
        if (e := fitted.errors) is not None
    ]
    header = ["MODEL", "MAPE", "P50", "P90", "P99", "MARGIN", "OVERRUNS", "BATCHES"]
    return output.columns(header, rows, right=range(1, len(header))) if rows else []


def range_words(profile: "Profile") -> list[str]:
    """Sizes of the measured batches, each beside the engine's limit."""
    if (largest := profile.measured) is None or profile.limits is None:
        return []
    return [
        f"iterations of up to {largest.ms:,.0f} ms",
        f"{largest.tokens:,} of {profile.limits.tokens:,} tokens",
        f"contexts of up to {largest.context:,} of {profile.limits.context:,}",
    ]


def coefficient_table(profile: "Profile") -> list[str]:
    from conserve.profiles.profile import MODELS

    rows = [
        [name, term, f"{value:.4g}", MODELS[name].terms[term]]
        for name, fitted in profile.models.items()
        for term, value in fitted.coefficients.items()
    ]
    return output.columns(["MODEL", "TERM", "MS", "WHAT IT STANDS FOR"], rows, right=(2,))


def time_table(profile: "Profile") -> list[str]:
    """Table of a chunk's time in ms by its size and context, by the best model; ~ marks extrapolation."""
    from conserve.profiles.batch import Batch, Slice

    model, measured = profile.model(), profile.measured

    def cell(slices: list[Slice]) -> str:
        ms = model.predict(Batch.of(slices))
        beyond = measured is not None and (ms > measured.ms or slices[0].context > measured.context)
        return f"{'~' if beyond else ''}{ms:.1f}"

    longest = profile.limits.context if profile.limits else TABLE_CONTEXTS[-1] + 1
    largest = profile.limits.tokens if profile.limits else TABLE_TOKENS[-1]
    contexts = [c for c in TABLE_CONTEXTS if c < longest]
    rows = [
        [f"{tokens} tokens", *[cell([Slice(tokens, c)]) for c in contexts]]
        for tokens in TABLE_TOKENS
        if tokens <= largest
    ]
    rows += [[f"{n} decodes", *[cell([Slice(1, c, True)] * n) for c in contexts]] for n in (1, 16, 64)]
    return output.columns(
        ["MS AFTER CONTEXT OF", *map(str, contexts)], rows, right=range(1, len(contexts) + 1)
    )


def mechanism_lines(profile: "Profile") -> list[str]:
    """Lines on empty iterations, safepoints and KV copies, if measured."""
    lines = []
    if profile.empty_iteration_ms is not None:
        lines.append(f"empty iteration: {profile.empty_iteration_ms:.2f} ms")
    if profile.safepoint is not None:
        point = profile.safepoint
        what = "a look at the flag" if profile.how == "measured" else "a safepoint"
        lines.append(f"{what}: {point.check_us:.3f} us, {point.per_iteration} safepoints in an iteration")
    if profile.kv_copies:
        rows = [
            [str(c.blocks), f"{c.bytes / 1e6:.1f}", f"{c.to_host_ms:.2f}", f"{c.to_device_ms:.2f}"]
            for c in profile.kv_copies
        ]
        lines += output.columns(["KV BLOCKS", "MB", "MS TO HOST", "MS TO DEVICE"], rows, right=range(4))
    return ["", *lines] if lines else []


def percent(share: float) -> str:
    return f"{share * 100:.2f} %"
