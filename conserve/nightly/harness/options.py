"""Options of suites that a harness runs: known names, each of its type."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from conserve.errors import SettingsError
from conserve.evals.plan import SuitePlan
from conserve.evals.plan_file import OF_SUITE, unknown


def typed_options(suite: SuitePlan, types: Mapping[str, type]) -> Mapping[str, Any]:
    """Options of a suite; raises `SettingsError` for an unknown one, and for one of another type."""
    for name, value in suite.options.items():
        if name not in types:
            raise SettingsError(unknown(f"suites.{suite.name}.{name}", name, (*OF_SUITE, *types)))
        if not isinstance(value, (list, tuple) if types[name] is list else types[name]):
            raise SettingsError(
                f"suites.{suite.name}.{name} is of type {types[name].__name__}, not {value!r}"
            )
    return suite.options


def options_fact(options: Mapping[str, Any], names: Collection[str]) -> str:
    """Options as a fact of the night; `none` where the file names none of them."""
    given = {name: options[name] for name in names if name in options}
    return json.dumps(given, sort_keys=True, default=str) if given else "none"
