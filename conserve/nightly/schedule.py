"""Schedules: the crontab line, or the systemd timer and service, that run an evaluation every night."""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from conserve.config import PROJECT_FILE, settings_files
from conserve.errors import ConserveError, one_line

STOP_S = 120  # for the progress of rows in flight to be saved
VARIABLES = ("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "XDG_CONFIG_HOME")
PREFIXES = ("AWS_", "CONSERVE_", "HF_", "VLLM_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """An evaluation, its file, its store, and the time of day at which it begins."""

    name: str
    file: Path
    home: Path
    hour: int
    minute: int
    command: tuple[str, ...]
    within_s: int | None = None  # a run that takes longer is stopped

    @property
    def key(self) -> str:
        """Name that tells it from evaluations of the same name in other files."""
        return f"{self.name}-{hashlib.blake2b(str(self.file).encode(), digest_size=4).hexdigest()}"

    @property
    def unit(self) -> str:
        """Name of the systemd units."""
        return f"conserve-{self.key}"

    @property
    def mark(self) -> str:
        """End of its line in a crontab."""
        return f"# conserve eval {self.key}"

    @property
    def words(self) -> list[str]:
        """Command of a night."""
        return [*self.command, "--home", str(self.home), "eval", "run", str(self.file)]


def own_command() -> tuple[str, ...]:
    """Command by which this program was called, with its path: cron has no PATH of the user's."""
    beside = Path(sys.executable).parent / "conserve"
    found = str(beside) if beside.exists() else shutil.which("conserve")
    return (found,) if found else (sys.executable, "-m", "conserve")


def crontab_line(schedule: Schedule) -> str:
    """Line of a crontab, in which a percent sign would end the command."""
    log = schedule.file.with_suffix(".log")
    bound = () if schedule.within_s is None else ("timeout", f"--kill-after={STOP_S}", str(schedule.within_s))
    night = f"cd {shlex.quote(str(schedule.file.parent))} && {shlex.join([*bound, *schedule.words])}"
    command = f"{night} >> {shlex.quote(str(log))} 2>&1".replace("%", r"\%")
    return f"{schedule.minute} {schedule.hour} * * * {command}"


def service(schedule: Schedule) -> str:
    """systemd service of one night."""
    words = " ".join(quoted(word) for word in schedule.words)
    bound = "" if schedule.within_s is None else f"TimeoutStartSec={schedule.within_s}\n"
    return (
        "[Unit]\n"
        f"Description=Nightly evaluation {schedule.name}\n\n"
        "[Service]\n"
        "Type=oneshot\n"
        f"WorkingDirectory={escaped(str(schedule.file.parent))}\n"
        f"ExecStart={words}\n"
        f"{bound}"
        f"TimeoutStopSec={STOP_S}\n"
    )


def timer(schedule: Schedule) -> str:
    """systemd timer; a night that the machine slept through is made up for."""
    return (
        "[Unit]\n"
        f"Description=Nightly evaluation {schedule.name}\n\n"
        "[Timer]\n"
        f"OnCalendar=*-*-* {schedule.hour:02}:{schedule.minute:02}:00\n"
        "Persistent=true\n\n"
        "[Install]\n"
        "WantedBy=timers.target\n"
    )


def escaped(text: str) -> str:
    """Text in which systemd expands nothing."""
    return text.replace("%", "%%").replace("$", "$$")


def quoted(word: str) -> str:
    """Word of a systemd command line."""
    plain = escaped(word).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{plain}"' if not word or set(word) & set(" \t;'\"\\") else plain


def install_crontab(schedule: Schedule) -> str:
    """Add the line to the user's crontab, in place of an earlier one that runs this file; returns a sentence."""
    known = ran(["crontab", "-l"], unless="no crontab for")
    known_lines = known.removesuffix("\n").split("\n") if known else []
    kept = [line for line in known_lines if not line.endswith(schedule.mark)]
    lines = [*kept, f"{crontab_line(schedule)} {schedule.mark}"]
    ran(["crontab", "-"], stdin="\n".join(lines) + "\n")
    return "added to your crontab; look with: crontab -l"


def install_units(schedule: Schedule, folder: Path | None = None) -> str:
    """Write the user's units and start the timer; returns a sentence. If that fails the files are as before."""
    folder = folder or Path.home() / ".config" / "systemd" / "user"
    folder.mkdir(parents=True, exist_ok=True)
    units = {
        folder / f"{schedule.unit}.service": service(schedule),
        folder / f"{schedule.unit}.timer": timer(schedule),
    }
    before = {path: path.read_bytes() if path.exists() else None for path in units}
    try:
        for path, text in units.items():
            path.write_text(text, encoding="utf-8")
        ran(["systemctl", "--user", "daemon-reload"])
        ran(["systemctl", "--user", "enable", "--now", f"{schedule.unit}.timer"])
    except (ConserveError, OSError):
        put_back(schedule, before)
        raise
    return f"the timer runs; look with: systemctl --user list-timers {schedule.unit}.timer{until_logout()}"


def until_logout() -> str:
    """Further sentence where the user's timers stop at the end of the last session."""
    try:
        said = ran(["loginctl", "show-user", str(os.getuid()), "--property=Linger"])
    except ConserveError:
        return ""
    return "; it stops when you log out; keep it with: loginctl enable-linger" if "Linger=no" in said else ""


def absent_at_night(environment: Mapping[str, str], secret_variable: str | None) -> list[str]:
    """Names of variables that change a run and are set here alone; the store's folder is in the command."""
    named = {*VARIABLES, secret_variable}
    return sorted(
        name
        for name, value in environment.items()
        if value
        and name != "CONSERVE_HOME"
        and (name in named or name.startswith(PREFIXES) or name.lower().endswith("_proxy"))
    )


def other_settings(environment: Mapping[str, str], here: Path, there: Path) -> str | None:
    """Sentence on the conserve.toml that one folder reads and the night's does not, or the other way round."""
    read, at_night = ([str(path) for path in settings_files(environment, one)] for one in (here, there))
    lost = [path for path in read if path not in at_night]
    more = [path for path in at_night if path not in read]
    begins = f"the night begins in {there}"
    if lost:
        instead = f", but {more[0]}" if more else f"; write what it needs to {there / PROJECT_FILE}"
        return f"{begins}: it does not read {lost[0]}{instead}"
    return f"{begins}: it reads {more[0]}, which is not read here" if more else None


def put_back(schedule: Schedule, before: Mapping[Path, bytes | None]) -> None:
    """Restore the units that were there, and remove those that were not; systemd forgets them if it can."""
    if None in before.values():
        with suppress(ConserveError):
            ran(["systemctl", "--user", "disable", "--now", f"{schedule.unit}.timer"])
    for path, text in before.items():
        if text is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(text)
    with suppress(ConserveError):
        ran(["systemctl", "--user", "daemon-reload"])


def ran(words: list[str], *, stdin: str = "", unless: str | None = None) -> str:
    """Output of a command, byte for byte; raises `ConserveError` if it fails, unless it says that there is none."""
    try:
        done = subprocess.run(
            words,
            input=stdin,
            capture_output=True,
            check=False,
            timeout=60,
            encoding="utf-8",
            errors="surrogateescape",
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConserveError(
            f"{words[0]} cannot be called ({error}); copy the printed lines instead"
        ) from error
    if done.returncode and (unless is None or unless not in done.stderr.lower()):
        raise ConserveError(
            f"{shlex.join(words)} failed ({one_line(done.stderr)}); copy the printed lines instead"
        )
    return done.stdout if not done.returncode else ""
