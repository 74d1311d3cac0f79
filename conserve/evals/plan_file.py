"""nightly.toml read: every fault is one sentence that names the entry. Pure."""

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

from conserve.errors import SettingsError, UsageError, one_line
from conserve.evals.paired import Standard
from conserve.evals.plan import (
    RESUME_S,
    Answering,
    Metric,
    ModelTarget,
    NightlyPlan,
    Overlap,
    Reports,
    SuitePlan,
    less_is_better,
)
from conserve.evals.records import HISTORY, PREVIOUS
from conserve.units import parse_length

T = TypeVar("T")

TOP = (
    "name", "seed", "limit", "epochs", "overlap", "keep", "resume", "against", "worse", "model", "models",
    "suites", "reports",
)  # fmt: skip
OF_SUITE = ("kind", "seed", "limit", "epochs", "worse", "metrics")
FORMS = ("html", "markdown", "junit", "json")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
STANDARD = Standard(effect=0.02)


def plan_of(text: str, *, title: str = "nightly.toml") -> NightlyPlan:
    """Plan of the file's text; raises `SettingsError` with one sentence for the first fault."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{title} is no TOML: {one_line(error)}") from error
    try:
        return PlanTable(found, "").plan()
    except UsageError as error:
        raise SettingsError(f"{title}: {error}") from error


class PlanTable:
    """A table of the file, whose entries are asked for by type; `path` names it in sentences."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self._values, self._path = values, path

    def plan(self) -> NightlyPlan:
        """Plan of the whole file."""
        self.only(TOP)
        standard = self.table("worse").standard(STANDARD)
        suites = self.table("suites")
        if not suites.names:
            raise SettingsError('there is no suite; write a table such as [suites.gsm8k] with kind = "sql"')
        return NightlyPlan(
            name=self.name_of("name", self.text("name") or "nightly"),
            targets=self.targets(),
            suites=tuple(suites.table(name).suite(name, self, standard) for name in suites.names),
            reports=self.table("reports").reports(),
            against=self.against(),
            overlap=self.choice("overlap", get_args(Overlap)) or "queue",
            keep_s=self.length("keep"),
            resume_s=self.length("resume") or RESUME_S,
        )

    def targets(self) -> tuple[ModelTarget, ...]:
        """Models or endpoints; the settings' own where none is named."""
        many = self.table("models")
        if "model" in self._values and many.names:
            raise SettingsError("give one [model] or several [models.NAME], not both")
        if many.names:
            return tuple(many.table(name).target(name) for name in many.names)
        return (self.table("model").target(""),)

    def target(self, name: str) -> ModelTarget:
        """One model or endpoint."""
        self.only(("model", "endpoint", "engine_args", "answered_by"))
        self.name_of("", name or "model")
        return ModelTarget(
            name=name,
            model=self.text("model"),
            endpoint=self.text("endpoint"),
            engine_args=self.texts("engine_args"),
            answered_by=self.choice("answered_by", get_args(Answering)) or "run",
        )

    def against(self) -> str:
        """Run that reports compare with, or one of two words; raises `SettingsError` for nearly one of them."""
        words = PREVIOUS, HISTORY
        given = self.text("against") or PREVIOUS
        near = [] if given in words else get_close_matches(given, words, n=1, cutoff=0.7)
        if near:
            raise SettingsError(f"{self._at('against')} is {given!r}; did you mean {near[0]}? Call no run so")
        return given

    def suite(self, name: str, whole: "PlanTable", standard: Standard) -> SuitePlan:
        """One suite; entries that are not common to all kinds are its kind's."""
        self.name_of("", name)
        kind = self.text("kind")
        if kind is None:
            raise SettingsError(f'{self._path} has no kind; write kind = "sql", or another of the reference')
        own = self.table("worse").standard(standard)
        metrics = self.table("metrics")
        limit = self.number("limit", least=1) or whole.number("limit", least=1)
        seed = self.number("seed", least=0)
        return SuitePlan(
            name=name,
            kind=kind,
            options={key: value for key, value in self._values.items() if key not in OF_SUITE},
            seed=whole.number("seed", least=0) or 0 if seed is None else seed,
            limit=limit,
            epochs=self.number("epochs", least=1) or whole.number("epochs", least=1) or 1,
            standard=own,
            metrics={
                metric: metrics.table(metric).metric(own, lower=less_is_better(kind, metric))
                for metric in metrics.names
            },
        )

    def metric(self, standard: Standard, *, lower: bool) -> Metric:
        """Measure of worse by one metric; `lower` says whether less is better unless the table does."""
        self.only(("effect", "confidence", "power", "lower_is_better", "judged"))
        given, judged = self.get("lower_is_better", bool), self.get("judged", bool)
        return Metric(
            standard=self._standard(standard),
            lower_is_better=lower if given is None else given,
            judged=judged is not False,
        )

    def standard(self, otherwise: Standard) -> Standard:
        """Measure of worse."""
        self.only(("effect", "confidence", "power"))
        return self._standard(otherwise)

    def _standard(self, otherwise: Standard) -> Standard:
        given = {key: self.real(key) for key in ("effect", "confidence", "power")}
        try:
            return replace(otherwise, **{key: value for key, value in given.items() if value is not None})
        except UsageError as error:
            raise SettingsError(f"{self._path}: {error}") from error

    def reports(self) -> Reports:
        """Table of the reports."""
        self.only(("folder", "forms", "webhook", "secret_variable"))
        forms = self.texts("forms") or ("html",)
        for form in forms:
            if form not in FORMS:
                raise SettingsError(f"{self._at('forms')} takes {', '.join(FORMS)}, not {form!r}")
        webhook = self.text("webhook")
        if webhook is not None and not webhook.startswith(("https://", "http://")):
            raise SettingsError(f"{self._at('webhook')} takes an http address, not {webhook!r}")
        return Reports(
            folder=self.text("folder"),
            forms=forms,
            webhook=webhook,
            secret_variable=self.text("secret_variable"),
        )

    @property
    def names(self) -> list[str]:
        """Names of the entries."""
        return list(self._values)

    def only(self, known: Collection[str]) -> None:
        """Raise for an entry of any other name; names the nearest."""
        for name in self._values:
            if name not in known:
                raise SettingsError(unknown(self._at(name), name, known))

    def get(self, name: str, kind: type[T]) -> T | None:
        """Entry of this type; None if it is missing."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise SettingsError(f"{self._at(name)} takes {WORDS[kind]}, not {one_line(value, most=60)}")
        return value

    def text(self, name: str) -> str | None:
        """Text that is not empty; None if it is missing."""
        value = self.get(name, str)
        if value is not None and not value.strip():
            raise SettingsError(f"{self._at(name)} is empty; leave the entry out, or give it a value")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """List of texts."""
        values = self.get(name, list) or []
        if not all(isinstance(value, str) for value in values):
            raise SettingsError(f"{self._at(name)} takes a list of texts, not {one_line(values, most=60)}")
        return tuple(values)

    def number(self, name: str, *, least: int) -> int | None:
        """Whole number; None if it is missing."""
        value = self.get(name, int)
        if value is not None and value < least:
            raise SettingsError(f"{self._at(name)} must be at least {least}, not {value}")
        return value

    def real(self, name: str) -> float | None:
        """Number; None if it is missing."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SettingsError(f"{self._at(name)} takes a number, not {one_line(value, most=60)}")
        return float(value)

    def length(self, name: str) -> float | None:
        """Length of time in s, of a text as 90d."""
        text = self.text(name)
        if text is None:
            return None
        if not (found := parse_length(text)):
            raise SettingsError(f"{self._at(name)} takes a length of time as 20h, 90d or 8w, not {text!r}")
        return found

    def choice(self, name: str, known: tuple[Any, ...]) -> Any:
        """One of these texts; None if it is missing."""
        value = self.text(name)
        if value is not None and value not in known:
            raise SettingsError(f"{self._at(name)} takes {', '.join(known)}, not {value!r}")
        return value

    def table(self, name: str) -> "PlanTable":
        """Table of this name; an empty one if it is missing."""
        return PlanTable(self.get(name, dict) or {}, self._at(name))

    def name_of(self, entry: str, name: str) -> str:
        """Name that files, tags and addresses all take."""
        if NAME.fullmatch(name) is None:
            where = self._at(entry) if entry else self._path
            raise SettingsError(f"{where}: a name is letters, digits, - _ and ., at most 64, not {name!r}")
        return name

    def _at(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


WORDS: dict[type, str] = {
    str: "a text",
    int: "a whole number",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}


def unknown(where: str, name: str, known: Collection[str]) -> str:
    """Sentence on an entry that no part of the file has; names the nearest."""
    near = get_close_matches(name, known, n=1)
    other = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
    return f"there is no entry {where}; {other}"
