"""deploy/ and the pages on it: files parse, they agree, and they ask the programs for what exists."""

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from conserve.cli.app import LazyCommands
from conserve.cli.serve_spill import SPILL_S
from conserve.cli.signals import end_as_first_process
from conserve.config import variables
from conserve.engine.service import DRAIN_S, HARVESTER_S
from tools.deploy.chart import CHART, GLOBAL, SETS, objects, values
from tools.deploy.check import LEAST
from tools.deploy.dockerfile import DOCKERFILE, ROOT, instructions, sent
from tools.deploy.rendered import faults
from tools.docs.generated import DOCS

yaml = pytest.importorskip("yaml")

DEPLOY = ROOT / "deploy"
PAGE = (DOCS / "how-to/deploy.md").read_text()
SHELL = [line.strip() for line in PAGE.splitlines() if re.match(r" {4}\S.*\bconserve ", line)]
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
YAML = sorted(path for path in DEPLOY.rglob("*.yaml") if path.parent.name != "templates")
PROGRAM = "/srv/conserve/.venv/bin/conserve"
DOCS_TO_FILL_IN = "https://docs.example.org/conserve"  # in the file of rules
OPERATORS = {"<", ">", ">>", "|", "||", "&&"}
STOP_S = HARVESTER_S + DRAIN_S + SPILL_S  # the longest stop, with --kv-spill
OF_STARTS = {"ConserveNotStarted", "ConserveNoHarvester"}  # alerts, after the time that a start may take
GIVEN = {"MODEL": "smollm2-demo", "SERVE_HOST": "0.0.0.0", "SERVE_FLAGS": "--ttft-slo 2s"}


def service(path: Path) -> configparser.SectionProxy:
    """The section `Service` of a unit."""
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]  # systemd's names have capitals
    unit.read_string(path.read_text().replace("\\\n", ""))
    return unit["Service"]


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    """A Compose file."""
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose" / name).read_text())
    return found


def filled(text: str) -> str:
    """A command with its variables replaced, as systemd and Compose do."""
    return re.sub(r"\$\{(\w+)[^}]*\}", lambda name: GIVEN[name[1]], text)


def asked_of_conserve() -> list[list[str]]:
    """Words behind `conserve` of each command in the units, the Compose file and the page."""
    commands = [shlex.split(filled(compose()["services"]["server"]["command"]))]
    for line in [filled(service(path)["ExecStart"]) for path in UNITS] + SHELL:
        words = shlex.split(line)
        for at, word in enumerate(words):
            if word in ("conserve", PROGRAM) and words[at - 1] not in ("-u", "-s", "useradd"):
                rest = words[at + 1 :]
                ends = [n for n, other in enumerate(rest) if other in OPERATORS]
                commands.append(rest[: ends[0]] if ends else rest)
    return commands


@pytest.mark.parametrize("words", asked_of_conserve(), ids=lambda words: " ".join(words[:2]))
def test_every_command_is_one_of_conserves(words: list[str]) -> None:
    with LazyCommands()[words[0]].make_context(words[0], words[1:]) as context:
        assert context.command.name == words[0]


def test_there_are_commands_of_every_kind() -> None:
    kinds = {words[0] for words in asked_of_conserve()}
    assert kinds == {"serve", "harvest", "api", "submit", "status", "check"}
    assert len(asked_of_conserve()) >= 9


def test_an_unknown_flag_would_be_seen() -> None:
    with pytest.raises(Exception, match="No such option"):
        LazyCommands()["harvest"].make_context("harvest", ["--endpint", "http://gpu1:8000"])


@pytest.mark.parametrize("line", SHELL)
def test_every_line_for_a_shell_is_one(line: str) -> None:
    command = re.sub(r"^(?:[\d*]+ ){5}", "", line)  # of a crontab
    assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0


def test_the_page_names_every_folder_and_the_folders_that_are_there() -> None:
    named = set(re.findall(r"`deploy/([\w/]+)`", PAGE.partition("`conserve serve` is one")[0]))
    assert {name.split("/")[0] for name in named} == {path.name for path in DEPLOY.iterdir()}
    assert all((DEPLOY / name).is_dir() for name in named)


@pytest.mark.parametrize("path", YAML, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_file_is_yaml(path: Path) -> None:
    assert list(yaml.safe_load_all(path.read_text()))


def test_every_service_has_the_time_that_a_stop_takes() -> None:
    server = (CHART / "templates/server.yaml").read_text()
    graces = [
        service(DEPLOY / "systemd/conserve-serve.service")["TimeoutStopSec"],
        compose()["services"]["server"]["stop_grace_period"].removesuffix("s"),
        yaml.safe_load((CHART / "values.yaml").read_text())["server"]["stopSeconds"],
    ]
    assert "terminationGracePeriodSeconds: {{ .Values.server.stopSeconds }}" in server
    (waits,) = re.findall(r'preStop: \{exec: \{command: \[sleep, "(\d+)"\]', server)
    assert all(float(grace) >= STOP_S + int(waits) for grace in graces)
    harvester = (CHART / "templates/harvester.yaml").read_text()
    short = [
        service(DEPLOY / "systemd/conserve-harvest.service")["TimeoutStopSec"],
        *re.findall(r"terminationGracePeriodSeconds: (\d+)", harvester),
    ]
    assert len(short) == 2
    assert all(float(grace) > HARVESTER_S for grace in short)


def test_environment_files_set_variables_that_exist() -> None:
    known = {*variables().values(), "MODEL", "SERVE_FLAGS", "SERVE_HOST"}
    for path in (DEPLOY / "systemd").glob("*.env"):
        assert set(re.findall(r"^#?([A-Z_]+)=", path.read_text(), re.MULTILINE)) <= known, path.name
        assert path.stem in {unit.stem.removeprefix("conserve-") for unit in UNITS}
    used = set(re.findall(r"\$\{(\w+):\?", (DEPLOY / "compose/compose.yaml").read_text()))
    given = set(re.findall(r"^(\w+)=", (DEPLOY / "compose/example.env").read_text(), re.MULTILINE))
    assert used <= given


def test_the_harvester_of_systemd_has_a_page_from_which_alerts_know_that_it_runs() -> None:
    assert re.search(
        r"^CONSERVE_METRICS_PORT=\d+$", (DEPLOY / "systemd/harvest.env").read_text(), re.MULTILINE
    )


def test_prometheus_scrapes_the_server_of_compose_and_its_harvester() -> None:
    words = shlex.split(filled(compose()["services"]["server"]["command"]))
    given = dict(pairwise(words))
    assert given["--metrics-host"] == "0.0.0.0"
    jobs = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text())["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    assert targets["conserve-harvester"] == [f"server:{given['--metrics-port']}"]
    assert targets["conserve-server"] == ["server:8000"]
    (known,) = {alert["expr"] for alert in alerts() if alert["alert"] == "ConserveDown"}
    assert all(re.fullmatch(re.findall('"(.+?)"', known)[0], name) for name in targets)


def test_no_secret_has_a_value() -> None:
    for path in [*(DEPLOY / "systemd").glob("*.env"), DEPLOY / "compose/example.env"]:
        for name, value in re.findall(r"^(\w*(?:KEY|PASSWORD))=(.*)$", path.read_text(), re.MULTILINE):
            assert value == "", f"{path.name}: {name}"


def test_no_url_has_a_password_that_compose_does_not_escape() -> None:
    assert not re.search(r"://\S*\$\{", (DEPLOY / "compose/compose.yaml").read_text())


def test_compose_mounts_files_that_exist() -> None:
    for name, one in compose()["services"].items():
        for volume in one.get("volumes", []):
            place = volume.partition(":")[0]
            if place.startswith("."):
                assert (DEPLOY / "compose" / place).exists(), f"{name}: {place}"
            else:
                assert place in compose()["volumes"], f"{name}: {place}"
    assert set(compose("gpu.yaml")["services"]) <= set(compose()["services"])
    assert (DEPLOY / "compose" / compose()["services"]["server"]["build"]["context"]).resolve() == ROOT


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_has_nothing_to_say_against_a_unit(path: Path, tmp_path: Path) -> None:
    unit = tmp_path / path.name
    unit.write_text(path.read_text().replace(PROGRAM, sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_no_other_user_reads_what_a_unit_writes() -> None:
    for path in UNITS:
        lines = path.read_text().splitlines()
        assert {"StateDirectoryMode=0700", "UMask=0077"} <= {*lines}, path
        assert ("CacheDirectory=conserve" in lines) == ("CacheDirectoryMode=0700" in lines), path


# The image


def test_the_image_runs_as_a_user_without_rights_and_writes_to_its_volume() -> None:
    last = [one for one in instructions(DOCKERFILE.read_text()) if one.stage == 1]
    said = {one.word: one.rest for one in last}
    assert said["USER"] == "10001:10001"
    assert said["VOLUME"] == said["WORKDIR"] == "/var/lib/conserve"
    written = dict(word.split("=", 1) for word in said["ENV"].split())
    for name in ("HOME", "XDG_CACHE_HOME", "CONSERVE_HOME"):
        assert written[name].startswith("/var/lib/conserve")
    assert said["ENTRYPOINT"] == '["conserve"]'
    assert [one.word for one in last].index("USER") > max(
        number for number, one in enumerate(last) if one.word == "RUN"
    )


def test_the_image_has_the_labels_of_oci() -> None:
    labels = next(one.rest for one in instructions(DOCKERFILE.read_text()) if one.word == "LABEL")
    for name in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{name}=" in labels


def test_the_image_copies_what_exists_and_what_the_builder_is_sent() -> None:
    copied = [one.rest for one in instructions(DOCKERFILE.read_text()) if one.word == "COPY"]
    sources = [source for rest in copied if not rest.startswith("--from") for source in rest.split()[:-1]]
    assert "conserve" in sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert sent(source), source
    assert not sent("docs")


def test_every_engine_is_an_extra_of_the_package() -> None:
    install = (DOCKERFILE.parent / "install.sh").read_text()
    assert subprocess.run(["bash", "-n"], input=install, text=True, check=False).returncode == 0
    extras = set(re.findall(r"\[([\w,]+)\]\"", install))
    assert extras == {"api,postgres", "cuda,api,postgres", "cpu,api,postgres"}
    project = (ROOT / "pyproject.toml").read_text()
    assert all(
        re.search(rf"^{extra} = \[", project, re.MULTILINE) for each in extras for extra in each.split(",")
    )


def test_an_instruction_over_several_lines_is_one() -> None:
    found = list(instructions("# c\nARG A=1\nFROM x\nRUN a \\\n # c\n  && b\nFROM y\nUSER 1\n"))
    assert found == [
        (-1, "ARG", "A=1"),
        (0, "FROM", "x"),
        (0, "RUN", "a && b"),
        (1, "FROM", "y"),
        (1, "USER", "1"),
    ]


# The chart


def schema() -> dict[str, Any]:
    """The schema of the chart's values."""
    found: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    return found


def test_the_page_names_servers_of_other_namespaces_with_theirs() -> None:
    """The release's own is made by the command, so it has none."""
    page = (DOCS / "how-to/kubernetes.md").read_text()
    found = re.findall(r"http://(vllm[\w.]*):8000", page)
    assert found
    assert {name.partition(".")[2] for name in found} == {"search"}


def test_the_pod_that_moves_the_queue_has_its_volume_and_a_command_of_conserves() -> None:
    page = (DOCS / "how-to/kubernetes.md").read_text()
    (pod,) = (
        one["spec"]
        for body in re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
        if (one := yaml.safe_load(body)).get("kind") == "Pod"
    )
    (container,) = pod["containers"]
    home = re.findall(r"CONSERVE_HOME=(\S+)", DOCKERFILE.read_text())[0]
    assert container["args"] == ["store", "move", f"sqlite:///{home}/conserve.db", "$(TARGET)"]
    assert [one["name"] for one in container["env"]] == ["TARGET"]
    assert home.startswith(container["volumeMounts"][0]["mountPath"])
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "night-conserve"}


def test_a_release_mounts_the_same_claim_before_and_after_its_queue_moves() -> None:
    pytest.importorskip("helm_python", reason="make deploy-check fetches it")
    for store in ({}, {"database": {"secret": "conserve-database"}}):
        (harvester,) = (one for one in objects({**LEAST, "store": store}) if one["kind"] == "Deployment")
        volumes = {one["name"]: one for one in harvester["spec"]["template"]["spec"]["volumes"]}
        assert volumes["store"]["persistentVolumeClaim"] == {"claimName": "night-conserve"}


def test_every_value_has_a_default_and_a_description() -> None:
    found = list(values())
    assert len(found) > 60
    assert all(says for _, _, says in found)
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft7Validator(schema()).validate(defaults)


@pytest.mark.parametrize("path", SETS, ids=lambda path: path.stem)
def test_the_sets_of_values_obey_the_schema(path: Path) -> None:
    jsonschema.Draft7Validator(schema()).validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    "given",
    [
        {"harvester": {"endpoint": "http://vllm:8000"}},
        {"harvester": {"endpoints": ["vllm:8000"]}},
        {"harvester": {"replicas": -1}},
        {"server": {"replicas": -1}},
        {"store": {"database": {"url": "postgresql://ann:secret@db/conserve"}}},
        {"server": {"keySecret": {"value": "secret"}}},
    ],
    ids=str,
)
def test_a_wrong_value_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(schema()).validate(given)


def test_the_number_of_servers_may_be_left_to_an_autoscaler() -> None:
    jsonschema.Draft7Validator(schema()).validate({"server": {"replicas": None}})
    server = (CHART / "templates/server.yaml").read_text()
    written = re.search(r"\{\{- if (.*) \}\}\n  replicas: .*\n  \{\{- end \}\}\n", server)
    assert written is not None
    assert written[1] == 'not (kindIs "invalid" .Values.server.replicas)', "0 is a number"


def test_an_upgrade_sets_no_number_of_servers_where_none_is_given() -> None:
    helm = pytest.importorskip("helm_python", reason="make deploy-check fetches it")
    given = yaml.safe_load((CHART / "ci/fleet.yaml").read_text())
    for replicas in (0, 2, None):
        given["server"]["replicas"] = replicas
        (server,) = (
            one["spec"]
            for one in objects(given)
            if one["kind"] == "Deployment" and one["metadata"]["name"].endswith("server")
        )
        assert server.get("replicas") == replicas
    given["store"] = {}
    given["harvester"]["replicas"] = given["api"]["replicas"] = 1
    with pytest.raises(helm.HelmError, match=r"server\.replicas above 1"):
        objects(given)


def test_every_value_is_used_and_every_used_value_exists() -> None:
    texts = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    roots = set(re.findall(r"\$?\w*\.Values\.(\w+)", texts))
    assert roots == set(schema()["properties"]) - {GLOBAL}


@pytest.mark.parametrize("path", SETS, ids=lambda path: path.stem)
def test_the_rendered_objects_fit_each_other(path: Path) -> None:
    pytest.importorskip("helm_python", reason="make deploy-check fetches it")
    assert list(faults(objects(yaml.safe_load(path.read_text())))) == []


@pytest.mark.parametrize(
    ("docs", "link"), [("https://a.org/b/", "https://a.org/b/how-to/alerts/#{}"), ("", None)]
)
def test_alerts_of_the_chart_link_to_the_site_that_it_is_told(docs: str, link: str | None) -> None:
    pytest.importorskip("helm_python", reason="make deploy-check fetches it")
    given = yaml.safe_load((CHART / "ci/fleet.yaml").read_text())
    given["metrics"]["docs"] = docs
    (rules,) = (one for one in objects(given) if one["kind"] == "PrometheusRule")
    found = [rule for group in rules["spec"]["groups"] for rule in group["rules"]]
    assert len(found) == len(list(alerts()))
    for rule in found:
        assert rule["annotations"].get("runbook_url") == (link and link.format(rule["alert"].lower()))


def test_prometheus_sends_a_server_its_own_key_and_the_api_one_of_the_store() -> None:
    """The API knows no other, and a server asks for one of the store as long as the store is there."""
    pytest.importorskip("helm_python", reason="make deploy-check fetches it")
    given = yaml.safe_load((CHART / "ci/fleet.yaml").read_text())
    for own, right in (("vllm", "vllm"), ("", "conserve-metrics")):
        given["server"]["keySecret"] = {"name": own}
        monitors = [one for one in objects(given) if one["kind"] == "ServiceMonitor"]
        assert {
            one["metadata"]["name"]: one["spec"]["endpoints"][0]["authorization"]["credentials"]["name"]
            for one in monitors
        } == {"night-conserve-server": right, "night-conserve-api": "conserve-metrics"}


@pytest.mark.parametrize(
    ("more", "needs"),
    [
        ({}, False),
        ({"server": {"enabled": True, "model": "m", "keySecret": {"name": "vllm", "key": "key"}}}, False),
        ({"server": {"enabled": True, "model": "m"}}, True),
        ({"api": {"enabled": True}}, True),
    ],
    ids=["harvester", "server with a key", "server", "api"],
)
def test_prometheus_needs_a_key_only_for_what_asks_for_one(more: dict[str, Any], needs: bool) -> None:
    helm = pytest.importorskip("helm_python", reason="make deploy-check fetches it")
    metrics = {"metrics": {"serviceMonitor": True}}
    with pytest.raises(helm.HelmError, match="keySecret") if needs else nullcontext():
        assert any(one["kind"] == "PodMonitor" for one in objects({**LEAST, **more, **metrics}))


def test_the_check_of_the_key_is_of_the_parts_that_ask_for_one() -> None:
    """Without Helm's engine: the sentence's condition names them."""
    check = (CHART / "templates/_helpers.tpl").read_text().partition("Prometheus needs a key")[0]
    condition = check[check.rindex("$keyless :=") :]
    assert {".api.enabled", ".server.enabled", ".server.keySecret.name", ".metrics.open"} <= set(
        re.findall(r"\$values((?:\.\w+)+)", condition)
    )


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_all_processes_listen_at_the_address_that_is_given(address: str) -> None:
    pytest.importorskip("helm_python", reason="make deploy-check fetches it")
    given = yaml.safe_load((CHART / "ci/fleet.yaml").read_text())
    made = [one for one in objects({**given, "listen": address}) if one["kind"] == "Deployment"]
    for one in made:
        words = one["spec"]["template"]["spec"]["containers"][0]["args"]
        behind = {value for flag, value in pairwise(words) if flag in ("--host", "--metrics-host")}
        assert behind == {address}, one["metadata"]["name"]
    assert len(made) == 3


def test_the_night_is_in_the_time_zone_that_is_given() -> None:
    pytest.importorskip("helm_python", reason="make deploy-check fetches it")
    given = yaml.safe_load((CHART / "ci/night.yaml").read_text())
    for zone in ("Europe/Berlin", ""):
        given["harvester"]["timeZone"] = zone
        (night,) = (one for one in objects(given) if one["kind"] == "CronJob")
        assert night["spec"].get("timeZone", "") == zone


def test_an_alert_on_a_harvester_that_is_missing_is_of_the_release_alone() -> None:
    pytest.importorskip("helm_python", reason="make deploy-check fetches it")
    given = yaml.safe_load((CHART / "ci/fleet.yaml").read_text())
    for enabled, args, found in ((True, [], 1), (False, [], 1), (False, ["--no-harvest"], 0)):
        given["harvester"]["enabled"], given["server"]["args"] = enabled, args
        (rules,) = (one for one in objects(given) if one["kind"] == "PrometheusRule")
        asked = [rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"]]
        absent = [expr for expr in asked if expr.startswith("absent(")]
        assert len(absent) == found
        assert all('conserve_build_info{namespace="batch", command' in expr for expr in absent)


def test_an_alert_on_a_start_comes_after_the_time_that_a_start_may_take() -> None:
    (written,) = {rule["for"] for rule in alerts() if rule["alert"] in OF_STARTS}
    assert written == f"{yaml.safe_load((CHART / 'values.yaml').read_text())['server']['startMinutes'] + 30}m"


def test_the_chart_gives_a_longer_start_more_time_before_its_alert() -> None:
    pytest.importorskip("helm_python", reason="make deploy-check fetches it")
    given = yaml.safe_load((CHART / "ci/fleet.yaml").read_text())
    given["server"]["startMinutes"] = 90
    (rules,) = (one for one in objects(given) if one["kind"] == "PrometheusRule")
    found = [rule for group in rules["spec"]["groups"] for rule in group["rules"]]
    assert [rule["for"] for rule in found if rule["alert"] in OF_STARTS] == ["120m"] * len(OF_STARTS)


def test_the_schema_takes_what_helm_adds_to_a_dependency() -> None:
    jsonschema.Draft7Validator(schema()).validate({"global": {"region": "eu"}})
    jsonschema.Draft7Validator(schema()).validate({"server": {"resources": {"claims": [{"name": "gpu"}]}}})


def test_the_chart_is_of_this_version() -> None:
    import conserve

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == conserve.__version__


def test_rules_and_dashboard_are_the_charts() -> None:
    for name, place in (("dashboard.json", "grafana/conserve.json"), ("rules.yaml", "prometheus/rules.yaml")):
        assert (DEPLOY / place).resolve() == CHART / "files" / name


@pytest.mark.parametrize("first", [True, False], ids=["first process", "another"])
def test_sigterm_ends_the_first_process_of_a_container(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with monkeypatch.context() as patched:
            if first:
                patched.setattr(os, "getpid", lambda: 1)
            end_as_first_process()
            if first:
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGTERM)
            else:
                assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_ends_the_wait_for_the_stores_first_key(tmp_path: Path) -> None:
    (script,) = re.findall(r"- '(.*conserve keys list.*)'", (CHART / "templates/api.yaml").read_text())
    program = tmp_path / "conserve"
    program.write_text("#!/bin/sh\necho asked >&2\n")
    program.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(["sh", "-c", script], env=path, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        assert waiting.stderr.readline() == "asked\n"
        waiting.terminate()
        assert waiting.wait(timeout=60) >= 0, "the shell itself ended, which it does as the first process too"


# Metrics


def test_alerts_dashboard_and_examples_ask_for_metrics_that_exist() -> None:
    page = (DOCS / "reference/metrics.md").read_text()
    known = set(re.findall(r"`(conserve_\w+)", page))
    asked = {metric for path in METRICS_IN for metric in re.findall(r"\bconserve_\w+", path.read_text())}
    assert len(asked) > 15
    assert asked <= known, asked - known


METRICS_IN = [
    DEPLOY / "prometheus/rules.yaml",
    DEPLOY / "prometheus/rules.test.yaml",
    DEPLOY / "grafana/conserve.json",
    DOCS / "how-to/deadlines.md",
    DOCS / "how-to/alerts.md",
]


def alerts() -> Iterator[dict[str, Any]]:
    """The alert rules."""
    for group in yaml.safe_load((DEPLOY / "prometheus/rules.yaml").read_text())["groups"]:
        yield from group["rules"]


def test_every_alert_has_its_lines_in_the_runbook() -> None:
    page = (DOCS / "how-to/alerts.md").read_text()
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^#|\Z)", page, re.DOTALL | re.MULTILINE))
    assert set(sections) == {alert["alert"] for alert in alerts()}
    for alert in alerts():
        name = alert["alert"]
        assert alert["annotations"]["runbook"] == f"how-to/alerts.md#{name.lower()}"
        assert alert["annotations"]["runbook_url"] == f"{DOCS_TO_FILL_IN}/how-to/alerts/#{name.lower()}"
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert "**Means.** " in sections[name]
        assert "**Do.** " in sections[name]


def test_every_alert_is_tried_with_figures_at_which_it_fires() -> None:
    tests = yaml.safe_load((DEPLOY / "prometheus/rules.test.yaml").read_text())["tests"]
    tried = [one for test in tests for one in test["alert_rule_test"]]
    assert {one["alertname"] for one in tried if one["exp_alerts"]} == {alert["alert"] for alert in alerts()}


def test_the_program_has_every_series_of_the_dashboard() -> None:
    pytest.importorskip("fastapi")
    from tools.deploy.panels import page, queries

    served = set(re.findall(r"^(conserve_\w+)", page(2.0), re.MULTILINE))
    asked = {name for _, query in queries() for name in re.findall(r"conserve_\w+", query)}
    assert asked <= served, asked - served
    assert {"conserve_rows_total", "conserve_harvester_waiting", "conserve_offline_tokens_total"} <= asked


def test_panels_of_the_dashboard_lie_side_by_side() -> None:
    panels = json.loads((DEPLOY / "grafana/conserve.json").read_text())["panels"]
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert panels[0]["type"] == "row"
    assert "harmed" in panels[0]["title"]
