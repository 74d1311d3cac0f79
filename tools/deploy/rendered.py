"""What the chart's objects must be to each other, which no schema says."""

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tools.deploy.chart import CHART

WORKLOADS = ("Deployment", "CronJob")
SHARED = "ReadWriteMany"
UNHARVESTED = ("ConserveNothingHarvested", "ConserveNoHarvester")
BACKOFF_LIMIT = 6  # Kubernetes's default


def faults(objects: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A sentence on each object that does not fit the others."""
    workloads = [one for one in objects if one["kind"] in WORKLOADS]
    for one in (one for one in objects if one["kind"] == "PersistentVolumeClaim"):
        yield from apart(one, workloads)
    for one in workloads:
        yield from gives_up(one)
        yield from ends_early(one)
        yield from cut_off(one)
        yield from killed(one)
        yield from unscraped(one, objects)
    yield from torn(workloads)
    yield from false_alarms(objects)
    for one in objects:
        yield from unwatched(one, objects)
        yield from namesake(one)


def apart(claim: Mapping[str, Any], workloads: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Workloads that may be placed on another node than the volume of one node that they mount."""
    if claim["spec"]["accessModes"] == [SHARED]:
        return
    for one in workloads:
        pod = template(one)["spec"]
        names = [volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["volumes"]]
        if claim["metadata"]["name"] in names and "podAffinity" not in pod.get("affinity", {}):
            yield f"{one['metadata']['name']} may land on another node than the volume"


def torn(workloads: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Workloads whose pods belong on one node, which does not take them all."""
    pods = [template(one)["spec"] for one in workloads]
    together = [pod for pod in pods if "podAffinity" in pod.get("affinity", {})]
    nodes = [(pod.get("nodeSelector"), pod.get("tolerations")) for pod in together]
    if any(one != nodes[0] for one in nodes):
        yield "all pods run on one node, and they are for different nodes"


def gives_up(workload: Mapping[str, Any]) -> Iterator[str]:
    """A Deployment that counts as failed while its start may still take."""
    for container in template(workload)["spec"]["containers"]:
        probe = container.get("startupProbe")
        if probe is None or workload["kind"] != "Deployment":
            continue
        may_take_s = probe["failureThreshold"] * probe["periodSeconds"]
        if workload["spec"].get("progressDeadlineSeconds", 600) <= may_take_s:
            yield f"the rollout of {workload['metadata']['name']} fails before its start may"


def false_alarms(objects: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A rule that fires all day where rows are run at night alone."""
    alerts = {
        rule["alert"]
        for one in objects
        if one["kind"] == "PrometheusRule"
        for group in one["spec"]["groups"]
        for rule in group["rules"]
    }
    parts = {
        one["metadata"]["labels"]["app.kubernetes.io/component"]
        for one in objects
        if one["kind"] == "Deployment"
    }
    if not parts & {"harvester", "server"}:
        yield from (f"{name} fires by day" for name in UNHARVESTED if name in alerts)


def ends_early(workload: Mapping[str, Any]) -> Iterator[str]:
    """A CronJob that an outage ends before its hours do: its pod is started again less than once a minute."""
    if workload["kind"] != "CronJob":
        return
    spec = workload["spec"]["jobTemplate"]["spec"]
    if spec.get("backoffLimit", BACKOFF_LIMIT) < spec["activeDeadlineSeconds"] / 60:
        yield f"{workload['metadata']['name']} ends with an outage of its servers"


def namesake(binding: Mapping[str, Any]) -> Iterator[str]:
    """Rights in another namespace that a release of this name in a third one would have under their name too."""
    if binding["kind"] != "RoleBinding":
        return
    for one in binding["subjects"]:
        if not binding["metadata"]["name"].endswith(f"-{one['namespace']}"):
            yield f"{binding['metadata']['name']} is the name of other releases too"


def cut_off(workload: Mapping[str, Any]) -> Iterator[str]:
    """A pod of a Service that may end while requests are still sent to it."""
    for container in template(workload)["spec"]["containers"]:
        if "readinessProbe" in container and "preStop" not in container.get("lifecycle", {}):
            yield f"{workload['metadata']['name']} ends before its Service leaves it out"


def killed(workload: Mapping[str, Any]) -> Iterator[str]:
    """A pod that is killed for what takes it out of its Service alone, such as a store that is being moved."""
    for container in template(workload)["spec"]["containers"]:
        probe = container.get("livenessProbe", {}).get("httpGet")
        if probe is not None and probe == container.get("readinessProbe", {}).get("httpGet"):
            yield f"{workload['metadata']['name']} is killed while it is not ready"


def unwatched(monitor: Mapping[str, Any], objects: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Objects that a monitor scrapes as a job that no alert on a silent process knows."""
    if monitor["kind"] not in ("ServiceMonitor", "PodMonitor"):
        return
    (pattern,) = set(re.findall(r'up\{job=~"(.+?)"\}', (CHART / "files/rules.yaml").read_text()))
    found = [one for one in objects if one["kind"] == "Service"]
    if monitor["kind"] == "PodMonitor":
        found = [template(one) for one in objects if one["kind"] in WORKLOADS]
    for labels in (one["metadata"]["labels"] for one in found):
        job = labels.get(monitor["spec"]["jobLabel"], "")
        if monitor["spec"]["selector"]["matchLabels"].items() <= labels.items() and not re.fullmatch(
            pattern, job
        ):
            yield f"no alert sees that the job {job!r} is silent"


def unscraped(workload: Mapping[str, Any], objects: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A pod with a harvester whose page Prometheus does not reach, though it is to scrape the release."""
    pod, name = template(workload), workload["metadata"]["name"]
    words = [word for one in pod["spec"]["containers"] for word in one.get("args", [])]
    if not {"harvest", "serve"} & set(words[:1]) or "--no-harvest" in words:
        return
    ports = [port for one in pod["spec"]["containers"] for port in one["ports"] if port["name"] == "metrics"]
    if [str(port["containerPort"]) for port in ports] != words_behind("--metrics-port", words):
        yield f"{name} has no port for the metrics of its harvester"
        return
    labels = pod["metadata"]["labels"].items()
    monitors = [one for one in objects if one["kind"] == "PodMonitor"]
    if any(one["kind"] == "ServiceMonitor" for one in objects) and not any(
        one["spec"]["selector"]["matchLabels"].items() <= labels for one in monitors
    ):
        yield f"no monitor scrapes the harvester of {name}"
    for policy in (one for one in objects if one["kind"] == "NetworkPolicy"):
        if policy["spec"]["podSelector"]["matchLabels"].items() <= labels and not any(
            {"protocol": "TCP", "port": port["containerPort"]} in rule["ports"]
            for rule in policy["spec"]["ingress"]
            for port in ports
        ):
            yield f"no peer reaches the metrics of the harvester of {name}"


def words_behind(flag: str, words: Sequence[str]) -> list[str]:
    """Values of a flag."""
    return [value for name, value in pairwise(words) if name == flag]


def template(workload: Mapping[str, Any]) -> Mapping[str, Any]:
    """Template of a workload's pods."""
    spec = workload["spec"]
    found: Mapping[str, Any] = (
        spec["jobTemplate"]["spec"]["template"] if "jobTemplate" in spec else spec["template"]
    )
    return found


def rendered_as_dependency(given: Mapping[str, Any]) -> dict[str, str]:
    """Manifests of a chart that has this one as a dependency; raises `helm_python.HelmError`."""
    import helm_python as helm

    with tempfile.TemporaryDirectory() as name:
        umbrella = Path(name)
        shutil.copytree(CHART, umbrella / "charts/conserve")
        described = "apiVersion: v2\nname: night\nversion: 0.1.0\n"
        (umbrella / "Chart.yaml").write_text(described)
        with helm.Chart.load(name) as chart:
            values = {"conserve": dict(given), "global": {"region": "eu"}}
            chart.validate_schema(values)
            return dict(chart.render(values, name="night", namespace="batch"))
