"""The rules of docs/how-to/deadlines.md: they parse, and ask for metrics that exist."""

import re
from typing import Any

import pytest

from conserve.jobs.deadlines.backlog import backlog
from conserve.jobs.telemetry.queue_metrics import LABEL, QueueCollector, QueueSeen
from tools.docs.generated import DOCS

yaml = pytest.importorskip("yaml")

PAGE = (DOCS / "how-to/deadlines.md").read_text()
RULES = [yaml.safe_load(body) for body in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)]
METRIC = re.compile(r"(conserve_\w+)(?:\{due_within=\"(\w+)\"\})?")


def shown(tokens_per_s: float | None = 1.0) -> list[str]:
    """Names and labels of the queue's gauges on the metrics page, at this rate of harvesting."""
    seen = QueueSeen(backlog=backlog([], tokens_per_s, now=0.0))
    families = QueueCollector(lambda: seen).collect()
    return [
        "".join(
            [sample.name, *(f'{{{key}="{value}"}}' for key, value in sample.labels.items() if key != LABEL)]
        )
        for family in families
        for sample in family.samples
    ]


def texts(value: Any) -> list[str]:
    """All texts of a document."""
    if isinstance(value, dict):
        return [text for one in value.values() for text in texts(one)]
    if isinstance(value, list):
        return [text for one in value for text in texts(one)]
    return [value] if isinstance(value, str) else []


def test_the_rules_are_of_the_kinds_that_the_page_names() -> None:
    kinds = [(rule["apiVersion"], rule["kind"]) for rule in RULES]
    assert kinds == [("keda.sh/v1alpha1", "ScaledObject"), ("autoscaling/v2", "HorizontalPodAutoscaler")]
    scaled, autoscaler = (rule["spec"] for rule in RULES)
    for trigger in scaled["triggers"]:
        assert trigger["type"] == "prometheus"
        assert {"serverAddress", "query", "threshold"} <= trigger["metadata"].keys()
        assert all(isinstance(value, str) for value in trigger["metadata"].values()), "KEDA takes texts alone"
    assert scaled["minReplicaCount"] == autoscaler["minReplicas"] == 1, "live requests start no engine"
    assert scaled["scaleTargetRef"]["name"] == autoscaler["scaleTargetRef"]["name"] == "night-conserve-server"
    (metric,) = autoscaler["metrics"]
    assert metric["external"]["target"] == {"type": "Value", "value": "800m"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["kind"]))
def test_the_rules_ask_for_metrics_that_exist(rule: dict[str, Any]) -> None:
    found = [match[0] for text in texts(rule["spec"]) for match in METRIC.finditer(text)]
    assert found
    assert set(found) <= set(shown())


def test_the_first_engine_is_asked_for_before_anything_was_harvested() -> None:
    """A query without a figure starts no engine."""
    triggers = [trigger["metadata"] for trigger in RULES[0]["spec"]["triggers"]]
    found = [
        one for one in triggers if {match[0] for match in METRIC.finditer(one["query"])} <= set(shown(None))
    ]
    (first,) = found
    assert float(first.get("activationThreshold", "0")) == 0
    assert float(first["threshold"]) >= 1e9, "it starts the first engine alone"


def test_the_page_of_metrics_names_them_all() -> None:
    page = (DOCS / "reference/metrics.md").read_text()
    assert all(METRIC.match(name) and METRIC.match(name)[1] in page for name in shown())  # type: ignore[index]
