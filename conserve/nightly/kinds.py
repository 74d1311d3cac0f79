"""Kinds of suites, by the name that nightly.toml gives them."""

from collections.abc import Mapping
from importlib import import_module

from conserve.errors import SettingsError
from conserve.evals.plan import SuitePlan
from conserve.nightly.suite import SuiteKind

KINDS = {
    "sql": "conserve.nightly.scored:SqlScored",
    "python": "conserve.nightly.scored:PythonScored",
    "schema": "conserve.nightly.scored:SchemaScored",
    "judge": "conserve.nightly.judged:JudgeScores",
    "lm-eval": "conserve.nightly.harness.lm_eval_suite:LmEvalSuite",
    "inspect": "conserve.nightly.harness.inspect_suite:InspectSuite",
}
ONE_AT_A_TIME = ("inspect",)  # inspect_ai refuses a second evaluation while one runs


def waves(kinds: Mapping[str, str]) -> list[list[str]]:
    """Suites by kind, in the lists that run together: all but those of a kind that runs one at a time, first."""
    later: list[str] = []
    for one in ONE_AT_A_TIME:
        later += [label for label, kind in kinds.items() if kind == one][1:]
    first = [label for label in kinds if label not in later]
    return [wave for wave in (first, *([label] for label in later)) if wave]


def kind_of(suite: SuitePlan) -> SuiteKind:
    """Make the kind of a suite; imports its module alone. Raises `SettingsError` for a kind that is not there."""
    if suite.kind not in KINDS:
        raise SettingsError(
            f"suites.{suite.name}: there is no kind {suite.kind!r}; there are: {', '.join(KINDS)}"
        )
    module, _, class_name = KINDS[suite.kind].partition(":")
    made: SuiteKind = getattr(import_module(module), class_name)()
    return made
