"""A first nightly.toml, from answers to a few questions."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from conserve.errors import SettingsError, UsageError
from conserve.evals.plan_file import plan_of
from conserve.nightly.mistakes import CHECK
from conserve.nightly.running import check
from conserve.nightly.samples import open_rows, paths_of
from conserve.store.sql import quoting as sql
from conserve.store.sql.input_columns import shown_names

PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # a column that SQL takes without quotes behind `i.`


@dataclass(frozen=True, slots=True, kw_only=True)
class NightlyWishes:
    """Answers from which a nightly.toml is written."""

    name: str
    data: str
    prompt: str
    expected: str
    model: str | None = None
    endpoint: str | None = None
    limit: int | None = None
    max_tokens: int = 256
    effect: float = 0.02


def text_of(wishes: NightlyWishes, column: str) -> str:
    """Text of a nightly.toml that explains itself; `column` is the right answer's in the view `inputs`."""
    asked = {"model": wishes.model, "endpoint": wishes.endpoint}
    target = "".join(f"{name} = {quoted(value)}\n" for name, value in asked.items() if value is not None)
    drawn = "                # the same rows every night, drawn by the seed"
    limit = f"limit = {wishes.limit}{drawn}\n" if wishes.limit else ""
    named = column if PLAIN.fullmatch(column) else quoted(sql.quoted(column))[1:-1]
    return (
        f"# conserve eval run nightly.toml\n"
        f"name = {quoted(wishes.name)}\n"
        f'overlap = "queue"         # if yesterday\'s run still goes: skip, queue or replace\n'
        f'keep = "400d"             # runs that are older are removed\n'
        f'against = "baseline"      # conserve eval name last baseline\n\n'
        f"[model]                   # without entries: as conserve run would\n{target}\n"
        f"[worse]                   # a fall of the mean score by so much, told with this confidence\n"
        f"effect = {wishes.effect}\nconfidence = 0.95\n\n"
        f"[reports]\n"
        f'folder = "reports"\nforms = ["html"]\n\n'
        f"[suites.{suite_name(wishes.data)}]\n"
        f'kind = "sql"\n'
        f"data = {quoted(wishes.data)}\n"
        f"prompt = {quoted(wishes.prompt)}\n"
        f"expected = {quoted(wishes.expected)}\n"
        f"{limit}"
        f"params = {{ max_tokens = {wishes.max_tokens} }}\n"
        f'score = """\n'
        f"select avg(contains(lower(r.text), lower(split_part(i.{named}::varchar, '#### ', -1))))\n"
        f"from results r join inputs i using (job_id, row_index)\n"
        f'"""\n'
    )


def suite_name(data: str) -> str:
    """Name of a suite, after its file."""
    stem = Path(data).name.partition(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_") or "questions"


def quoted(text: str) -> str:
    """Text as TOML: a JSON text is one, but for a deletion sign."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def write(path: Path, wishes: NightlyWishes) -> None:
    """Write the file; raises `UsageError` if there is one already, or for questions that cannot be asked."""
    folder = path.parent.absolute()
    with open_rows(paths_of([wishes.data], folder)) as rows:
        in_view = shown_names(list(rows.columns))
    text = text_of(wishes, in_view.get(wishes.expected, wishes.expected))
    try:
        check(plan_of(text), folder)
    except SettingsError as error:
        raise SettingsError(error.without(CHECK)) from error  # there is no file to check yet
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(f"{path} is there already; name another file, or remove it") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); choose another folder") from error


QUESTIONS: Mapping[str, tuple[str, str | None]] = {
    "data": ("File of questions (Parquet, JSONL, CSV)", None),
    "prompt": ("Prompt, with columns in braces", "{{ question }}"),
    "expected": ("Column of the right answer", "answer"),
    "model": ("Model (a folder or hub id; empty for an endpoint or the settings)", ""),
    "endpoint": ("Endpoint (an address; empty for none)", ""),
    "served": ("Its model, as it lists it (empty if it has one alone)", ""),
    "limit": ("Number of questions a night (0 for all)", "200"),
}
"""Questions on a terminal, and the default answer of each."""
