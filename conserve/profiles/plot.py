"""Plots a profile: predicted against measured times."""

import statistics
from pathlib import Path

from conserve.errors import ProfileMissing, SettingsError
from conserve.profiles.fit import Samples
from conserve.profiles.profile import Profile, read_sample

COLOURS = {"prefill": "tab:blue", "decode": "tab:orange", "mixed": "tab:green", "held-out": "tab:red"}


def plot_profile(profile: Profile, path: Path) -> None:
    """Write a PNG with one panel per model, both axes logarithmic.

    Raises `SettingsError` without matplotlib or if the file cannot be written, `ProfileMissing` without samples.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        from conserve.installation import install_line

        raise SettingsError(f"--plot needs matplotlib; run: {install_line('plot')}") from error
    if not profile.samples:
        raise ProfileMissing(
            f"the profile {profile.name} has no measurements to plot; run: conserve profile MODEL"
        )
    measured = [read_sample(line) for line in profile.samples]
    figure = Figure(figsize=(5 * len(profile.models), 5), layout="constrained")
    panels = figure.subplots(1, len(profile.models), squeeze=False)[0]
    for axes, (name, fitted) in zip(panels, profile.models.items(), strict=True):
        for kind, colour in COLOURS.items():
            chosen = [(point.batch, statistics.median(ms)) for point, ms in measured if point.kind == kind]
            if chosen:
                samples = Samples.of([batch for batch, _ in chosen], [ms for _, ms in chosen])
                axes.loglog(
                    samples.ms,
                    samples.predictions(profile.model(name)),
                    ".",
                    color=colour,
                    label=kind,
                    alpha=0.7,
                )
        axes.axline((1, 1), (10, 10), color="grey", linewidth=0.8)
        mape = f", MAPE {fitted.errors.mape:.2%}" if fitted.errors else ""
        axes.set(title=f"{name}{mape}", xlabel="measured (ms)", ylabel="predicted (ms)")
        axes.legend()
    figure.suptitle(f"{profile.name} on {profile.key.device}")
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise SettingsError(f"{path} cannot be written ({error.strerror}); name another file") from error
