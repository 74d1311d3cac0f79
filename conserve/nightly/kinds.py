"""Kinds of suites, by the name that nightly.toml gives them."""

from importlib import import_module

from conserve.errors import SettingsError
from conserve.nightly.suite import SuiteKind

KINDS = {
    "sql": "conserve.nightly.scored:SqlScored",
    "python": "conserve.nightly.scored:PythonScored",
    "schema": "conserve.nightly.scored:SchemaScored",
    "judge": "conserve.nightly.judged:Judged",
    "lm-eval": "conserve.nightly.harness.lm_eval_suite:LmEvalSuite",
    "inspect": "conserve.nightly.harness.inspect_suite:InspectSuite",
}


def kind_of(name: str) -> SuiteKind:
    """Make a suite kind; imports its module alone."""
    if name not in KINDS:
        raise SettingsError(f"there is no kind of suite {name!r}; there are: {', '.join(KINDS)}")
    module, _, class_name = KINDS[name].partition(":")
    made: SuiteKind = getattr(import_module(module), class_name)()
    return made
