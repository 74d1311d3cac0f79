"""The Helm chart: rendered by Helm's own engine, and the page on its values."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CHART = Path(__file__).parents[2] / "deploy/helm/conserve"
SETS = sorted((CHART / "ci").glob("*.yaml"))
GLOBAL = "global"  # Helm adds it to a chart that is a dependency
HEAD = """# Values of the chart

[Deploy on Kubernetes](../how-to/kubernetes.md) installs the chart `deploy/helm/conserve`. `make reference` writes
this page from its schema and its defaults. A value that the schema does not know is refused. Secrets are named,
never given.

| value | default | |
|---|---|---|
"""


def page() -> str:
    """The reference page on the chart's values."""
    return HEAD + "".join(f"| `{name}` | {default} | {says} |\n" for name, default, says in values())


def values() -> Iterator[tuple[str, str, str]]:
    """Name, default and description of each value, in the schema's order."""
    import yaml

    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    for name, one, default in leaves(schema, defaults):
        yield name, "" if default in ("", [], {}) else f"`{plain(default)}`", one["description"]


def leaves(schema: Mapping[str, Any], defaults: Any, under: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Values with their schema and default; raises `KeyError` for one without a default."""
    for name, one in schema["properties"].items():
        if name == GLOBAL:
            continue
        if "properties" in one:
            yield from leaves(one, defaults[name], f"{under}{name}.")
        else:
            yield f"{under}{name}", one, defaults[name]


def plain(value: Any) -> str:
    """A default as in YAML, on one line."""
    return json.dumps(value).replace('"', "") if isinstance(value, (dict, list, bool)) else str(value)


def rendered(given: Mapping[str, Any], name: str = "night") -> dict[str, str]:
    """Manifests by template, as Helm makes them; raises `helm_python.HelmError` for values that it refuses."""
    import helm_python as helm

    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(dict(given))
        return dict(chart.render(dict(given), name=name, namespace="batch"))


def objects(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rendered objects."""
    import yaml

    texts = (text for name, text in rendered(given).items() if name.endswith(".yaml"))
    return [one for text in texts for one in yaml.safe_load_all(text) if one]
