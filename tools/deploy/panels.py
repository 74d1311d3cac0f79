"""Every panel of the dashboard on a real Prometheus, which scrapes the program's metrics with made-up figures."""

import json
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from conserve.server_report import SchedulerReport, of_engine
from tests.server_reports import SCHEDULER, changed, of_class
from tools.deploy.dashboard import dashboard

SCRAPE_S = 1
WITHIN_S = 60.0  # for the first scrapes
CHOICES = {"$job": ".*", "$instance": ".*", "$__rate_interval": "5s"}


def page(seconds: float) -> str:
    """Metrics of a server with classes of live traffic, of a harvester and of the API, this long after a start."""
    from prometheus_client import generate_latest

    from conserve.engine.vllm.server.metrics import Report

    return (generate_latest(Report(report(seconds), {})) + generate_latest(queue(seconds))).decode()  # type: ignore[arg-type]


def queue(seconds: float) -> Any:
    """Registry of a harvester and of its queue."""
    from prometheus_client import CollectorRegistry

    from conserve.endpoints.protocol import Call, Url
    from conserve.errors import EndpointBusy
    from conserve.jobs.deadlines.backlog import Backlog
    from conserve.jobs.harvest.tally import Tally
    from conserve.jobs.telemetry.metrics import HarvesterCollector, HarvestMetrics
    from conserve.jobs.telemetry.queue_metrics import QueueCollector, QueueSeen

    backlog = Backlog(due_s=((3600, 1800.0), (86400, 7200.0)), total_s=9000.0, load=0.6)
    seen = QueueSeen(name="0a1b2c3d", rows_waiting=30, jobs_waiting=3, backlog=backlog)
    tally = Tally(succeeded=int(seconds * 10), in_flight=16)
    found = CollectorRegistry()
    found.register(QueueCollector(lambda: seen))
    harvester = SimpleNamespace(tally=tally, ready_at=0.0, endpoint=SimpleNamespace(capacity=16))
    found.register(HarvesterCollector(harvester))  # type: ignore[arg-type]
    metrics = HarvestMetrics(found)
    for _ in range(int(seconds)):
        metrics.broke(Call(key="1", url=Url.CHAT, body={}), EndpointBusy("busy"), begun=0.0, seconds=0.0)
    return found


def report(seconds: float) -> SchedulerReport:
    """A scheduler's report this long after a start: gauges, and counts that grow."""
    ratio = {"with_ms": 208.0, "without_ms": 200.0, "ratio": 1.04, "low": 0.98, "high": 1.1}
    chat = of_class(
        requests=4,
        attainment=0.995,
        promises={"ttft_ms": {"p99": {"promised_ms": 300.0, "seen_ms": 280.0, "kept": True}}},
        ttft_ms={"p50": 90.0, "p99": 280.0},
        tbt_ms={"p50": 9.0, "p99": 30.0},
    )
    gauges = {
        "slo": {"harm": 0.1},
        "harm": {"ttft_ms": {"p50": ratio, "p99": ratio}, "tbt_ms": {"p50": ratio}},
        "classes": {"chat": chat},
        "preemption": {"reaction_ms": {"p50": 2.0, "p99": 9.0}},
    }
    return of_engine(changed(counted(SCHEDULER, int(100 * seconds)), gauges))


def counted(said: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A part of a report with this number in place of each count of nothing."""
    found = {
        name: counted(value, number) if isinstance(value, Mapping) else value for name, value in said.items()
    }
    return {name: number if value == 0 and value is not False else value for name, value in found.items()}


def queries() -> Iterator[tuple[str, str]]:
    """Title and PromQL of each query, with the dashboard's choices made."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"]
            for name, value in CHOICES.items():
                query = query.replace(name, value)
            yield panel["title"], query


def without_figures(program: str, folder: Path) -> list[str]:
    """Panels for which Prometheus has no figure after some scrapes; raises `OSError` if it does not start."""
    with exporter() as target, prometheus(program, folder, target) as url:
        left, until = list(queries()), time.monotonic() + WITHIN_S
        while left and time.monotonic() < until:
            time.sleep(SCRAPE_S)
            left = [(title, query) for title, query in left if not answered(url, query)]
    return [f"{title}: {query}" for title, query in left]


def answered(url: str, query: str) -> bool:
    """True if Prometheus answers the query with figures."""
    try:
        with urlopen(f"{url}/api/v1/query?{urlencode({'query': query})}", timeout=10) as answer:
            found = json.load(answer)["data"]["result"]
    except OSError:
        return False
    return any(one["value"][1] != "NaN" for one in found)


@contextmanager
def exporter() -> Iterator[str]:
    """Address of a server with the made-up metrics."""
    begun = time.monotonic()

    class Exporter(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page(time.monotonic() - begun).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *words: Any) -> None:
            pass

    page(0)  # imports now, and not while Prometheus waits
    server = ThreadingHTTPServer(("127.0.0.1", 0), Exporter)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def prometheus(program: str, folder: Path, target: str) -> Iterator[str]:
    """URL of a Prometheus that scrapes the target every second and reads the alert rules."""
    rules = Path(__file__).parents[2] / "deploy/prometheus/rules.yaml"
    settings = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "conserve-server", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yaml").write_text(json.dumps(settings))
    port = free_port()
    words = [
        program,
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(words, stdout=log, stderr=log) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def free_port() -> int:
    """A port that is free now."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        return int(server.server_port)
