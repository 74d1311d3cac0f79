"""Options of suites that ask the rows of a data set."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from conserve.api.asking import TaskRequest
from conserve.errors import SettingsError, UsageError, one_line
from conserve.evals.plan import SuitePlan
from conserve.evals.plan_file import OF_SUITE, PlanTable, unknown
from conserve.jobs.requests.parameter_names import unknown_name
from conserve.nightly.samples import columns_of

ASKING = ("prompt", "prompt_file", "messages", "system", "completions", "params", "unknown_params")
SENDS = "unknown_params = true sends"
OPTIONS = ("data", "id", "group", "expected", *ASKING)


class Options:
    """Options of a suite by type; `own` are those that its kind alone has."""

    def __init__(self, suite: SuitePlan, folder: Path, own: Collection[str] = ()) -> None:
        self.suite, self.folder, self.where = suite, folder, f"suites.{suite.name}"
        self.table = PlanTable(suite.options, self.where)
        known = (*OF_SUITE, *OPTIONS, *own)
        for name in suite.options:
            if name not in known:
                raise SettingsError(unknown(f"{self.where}.{name}", name, known))

    @property
    def data(self) -> Sequence[str]:
        """Names of the data set's files."""
        given = self.suite.options.get("data")
        names = (given,) if isinstance(given, str) else self.table.texts("data")
        if not names:
            raise SettingsError(f'{self.where} has no data; name a file: data = "questions.jsonl"')
        return names

    def columns(self) -> list[str]:
        """Columns that the options name."""
        named = (self.table.text(name) for name in ("id", "group", "expected"))
        return [name for name in named if name is not None]

    def asking(self) -> dict[str, Any]:
        """Arguments of `Store.submit`."""
        return asking_of(self.table, self.suite, self.folder)

    def required(self, name: str, example: str) -> str:
        """Text that must be given."""
        value = self.table.text(name)
        if value is None:
            raise SettingsError(f"{self.where} has no {name}; write one: {name} = {example}")
        return value

    def check(self) -> list[str]:
        """Columns of the data set; raises for options with which no row could be asked."""
        data, asking, named = self.data, self.asking(), self.columns()
        try:
            found = columns_of(data, TaskRequest(**asking, unknown_params=True).task(), self.folder)
        except UsageError as error:
            raise SettingsError(f"{self.where}: {error}") from error
        for name in named:
            if name not in found:
                said = f"{self.where} names the column {name!r}, but the columns are: {', '.join(found)}"
                raise SettingsError(one_line(said, most=2000))
        return found


def asking_of(table: PlanTable, suite: SuitePlan, folder: Path) -> dict[str, Any]:
    """Arguments of `Store.submit` by a table: greedy unless its parameters say otherwise."""
    params = {"temperature": 0, **(table.get("params", dict) or {})}
    if not table.get("unknown_params", bool) and (fault := unknown_name(params, SENDS)) is not None:
        raise SettingsError(f"suites.{suite.name}: {fault}")
    if params["temperature"]:
        params.setdefault("seed", suite.seed)
    given: dict[str, Any] = {
        "prompt": prompt_of(table, suite, folder),
        "messages": table.text("messages"),
        "system": table.text("system"),
        "completions": bool(table.get("completions", bool)),
        "params": params,
    }
    if given["prompt"] is None and given["messages"] is None:
        raise SettingsError(
            f'suites.{suite.name} asks nothing; write prompt = "{{{{ question }}}}" or messages = "messages"'
        )
    return given


def prompt_of(table: PlanTable, suite: SuitePlan, folder: Path) -> str | None:
    """Template of the prompt, given or in a file."""
    given, name = table.text("prompt"), table.text("prompt_file")
    if name is None:
        return given
    try:
        return (folder / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        words = f"suites.{suite.name}: the prompt file {folder / name} cannot be read; write it, as UTF-8"
        raise SettingsError(words) from error
