"""`conserve eval init` and `schedule`: the first file, and the timer that runs it."""

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from conserve.cli import output
from conserve.cli.context import Context
from conserve.errors import ConserveError, UsageError
from conserve.units import parse_length

WAYS = ("cron", "systemd")


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")] = Path("nightly.toml"),
    data: Annotated[str | None, typer.Option(metavar="FILE", help="Questions, one a row.")] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Template over a row's columns, as {{ question }}.")
    ] = None,
    expected: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of the right answer.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Local folder or hub id.")] = None,
    endpoint: Annotated[str | None, typer.Option(metavar="URL", help="Server instead of an engine.")] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Questions a night; 0 for all.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the evaluation; the file's by default.")] = None,
) -> None:
    """Write a nightly.toml, from flags; on a terminal what they leave open is asked."""
    from conserve.nightly import init_file

    given = {"data": data, "prompt": prompt, "expected": expected, "model": model, "endpoint": endpoint,
             "limit": limit}  # fmt: skip
    answers = {key: answer_of(key, value, init_file.QUESTIONS[key], given) for key, value in given.items()}
    if answers["endpoint"] and not answers["model"]:
        answers["model"] = answer_of("served", None, init_file.QUESTIONS["served"], given)
    wishes = init_file.NightlyWishes(
        name=name or re.sub(r"[^A-Za-z0-9_.-]+", "-", file.stem).strip("-._") or "nightly",
        data=str(answers["data"]),
        prompt=str(answers["prompt"]),
        expected=str(answers["expected"]),
        model=answers["model"] or None,
        endpoint=answers["endpoint"] or None,
        limit=number(answers["limit"]),
    )
    init_file.write(file, wishes)
    output.say(f"wrote {file}; try it with: conserve eval run {file} --limit 3")


def answer_of(key: str, value: Any, question: tuple[str, str | None], given: dict[str, Any]) -> Any:
    """Value of a flag; else the user's answer on a terminal, or the default."""
    if value is not None or (key == "endpoint" and given["model"]) or (key == "model" and given["endpoint"]):
        return value
    words, default = question
    if sys.stdin.isatty():
        return typer.prompt(words, default=default, show_default=bool(default), err=True)
    if default is None:
        raise UsageError(f"--{key} is missing; name a file of questions: --{key} questions.jsonl")
    return default


def number(answer: Any) -> int | None:
    """Number of questions; None for all."""
    text = str(answer).strip()
    if not text.isdigit():
        raise UsageError(f"the number of questions is a whole number, not {text!r}")
    return int(text) or None


def schedule(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The evaluation: nightly.toml.")],
    at: Annotated[str, typer.Option(metavar="TIME", help="Time of day, local: 01:30.")] = "01:30",
    within: Annotated[
        str | None,
        typer.Option(metavar="LENGTH", help="Stop a run that takes longer: 6h, 90m."),
    ] = None,
    install: Annotated[
        str | None, typer.Option(metavar="WAY", help="Install it for this user: cron or systemd.")
    ] = None,
) -> None:
    """Print the crontab line, and the systemd timer and service, that run a file every night."""
    from conserve.nightly import schedule as schedules
    from conserve.nightly.running import plan_of_file

    if install is not None and install not in WAYS:
        raise UsageError(f"--install takes {' or '.join(WAYS)}, not {install!r}")
    hour, minute = time_of(at)
    plan, _ = plan_of_file(file)
    context: Context = ctx.obj
    night = schedules.Schedule(
        name=plan.name,
        file=file.absolute(),
        home=context.settings().home.absolute(),
        hour=hour,
        minute=minute,
        command=schedules.own_command(),
        within_s=None if within is None else length_of(within),
    )
    if absent := schedules.absent_at_night(os.environ, plan.reports.secret_variable):
        output.warn(
            f"{', '.join(absent)}: set here, and not at night; cron: write NAME=value above the line (crontab -e); "
            f"systemd: name a file of them by EnvironmentFile= (systemctl --user edit {night.unit}.service)"
        )
    if other := schedules.other_settings(os.environ, Path.cwd(), night.file.parent.resolve()):
        output.warn(other)
    lines = (
        f"# crontab -e\n{schedules.crontab_line(night)}\n\n"
        f"# ~/.config/systemd/user/{night.unit}.service\n{schedules.service(night)}\n"
        f"# ~/.config/systemd/user/{night.unit}.timer\n{schedules.timer(night)}"
    ).rstrip()
    if install is None:
        output.data(lines)
        return
    installed = schedules.install_crontab if install == "cron" else schedules.install_units
    try:
        output.say(installed(night))
    except ConserveError:
        output.data(lines)  # which the error says to copy
        raise


def length_of(text: str) -> int:
    """Seconds in the text of `--within`; raises `UsageError` for any other text."""
    found = parse_length(text)
    if found is None or found < 1:
        raise UsageError(f"--within {text!r} is no length of time; write 6h or 90m")
    return round(found)


def time_of(text: str) -> tuple[int, int]:
    """Hour and minute of a time of day."""
    found = re.fullmatch(r"(\d{1,2}):(\d{2})", text.strip())
    if found is None or int(found[1]) > 23 or int(found[2]) > 59:
        raise UsageError(f"--at {text!r} is no time of day; write 01:30")
    return int(found[1]), int(found[2])
