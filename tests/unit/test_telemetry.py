"""Metrics and traces of harvesters, as the tools that watch them get them."""

import ast
import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from conserve import __version__
from conserve.batch_api.foresight import Foresight
from conserve.batch_api.metrics import ApiMetrics
from conserve.config import Settings, load
from conserve.endpoints.fake import FakeEndpoint, Script
from conserve.endpoints.protocol import Call, Endpoint, Url
from conserve.endpoints.wrapped import WrappedEndpoint
from conserve.errors import (
    EndpointBusy,
    EndpointUnusable,
    RequestRejected,
    RetryableError,
    SettingsError,
    StoreError,
)
from conserve.http_server import CALLER_HEADER, SaidOf
from conserve.jobs.deadlines.backlog import Backlog
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.harvest.observer import ObservedEndpoint, Observer, Observers
from conserve.jobs.harvest.tally import Tally
from conserve.jobs.task import Kind, Task
from conserve.jobs.telemetry import otlp, queue_metrics
from conserve.jobs.telemetry.metrics import BROKEN, WITHDRAWN, HarvesterCollector, HarvestMetrics, kind_of
from conserve.jobs.telemetry.queue_metrics import KEPT_S, LABEL, QueueCollector, QueueSeen, StoreLook
from conserve.metrics_page import new_registry
from conserve.server_report import of_engine
from conserve.store.books import catalog, harvested, keys, queue
from conserve.store.books.leases import Terms
from conserve.store.books.states import JobState
from conserve.store.database.store import Store
from tests import virtual_time
from tests.acceptance.aimed import command
from tests.acceptance.forks import Forks
from tests.acceptance.scripted_server import ScriptedServer
from tests.commands import REPOSITORY, conserve, ended, until
from tests.conftest import WriteInput
from tests.otlp_receiver import OtlpReceiver
from tests.server_reports import changed
from tests.submitting import submit
from tools.docs.generated import DOCS

TASK = Task(kind=Kind.PROMPT, template="{{ q }}")


@pytest.fixture(autouse=True)
def scrapes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine under load leaves no figure out."""
    monkeypatch.setattr(queue_metrics, "WAIT_S", 60.0)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    for name in (*otlp.ENDPOINTS, otlp.DISABLED, otlp.EXPORTER, otlp.SERVICE):
        monkeypatch.delenv(name, raising=False)
    with OtlpReceiver() as receiver:
        yield receiver


def harvested_page(store: Store, script: Script) -> dict[str, float]:
    """Samples after the queue was drained, by name and labels."""
    registry = new_registry("run", [QueueCollector(lambda: None)])

    async def run() -> None:
        clock = asyncio.get_running_loop().time
        harvester = Harvester(store, FakeEndpoint(script), clock=clock, observer=HarvestMetrics(registry))
        registry.register(HarvesterCollector(harvester))
        await harvester.run(asyncio.Event())

    virtual_time.run(run())
    return samples(registry)


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """Samples of a page, those with labels but for the queue's name by their values."""
    return {
        "/".join(
            [sample.name, *(value for key, value in sample.labels.items() if key != LABEL)]
        ): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def queue_up(store: Store, write_input: WriteInput, *prompts: str) -> str:
    return submit(store, str(write_input(q=list(prompts))), TASK).job_id


# Metrics.


def test_a_drained_queue_is_counted_once_a_row(store: Store, write_input: WriteInput) -> None:
    queue_up(store, write_input, *[f"row {number}" for number in range(40)])
    page = harvested_page(store, Script(token_ms=100.0, tokens=70))  # of which the first 64 are saved
    assert page["conserve_rows_total/succeeded"] == 40
    assert page["conserve_rows_total/failed"] == page["conserve_rows_total/late"] == 0
    for name in ("row_latency_seconds", "row_prompt_tokens", "row_completion_tokens"):
        assert page[f"conserve_{name}_count"] == 40
    assert page["conserve_claim_rows_sum"] == page["conserve_commit_rows_sum"] == 40
    assert page["conserve_claim_rows_count"] == page["conserve_claim_seconds_count"] > 0
    assert page["conserve_commit_rows_bucket/1.0"] == 0, "saved tokens alone are no commit"
    assert page["conserve_commit_rows_count"] == page["conserve_commit_seconds_count"] > 0
    assert page["conserve_row_tokens_total/prompt"] == page["conserve_row_prompt_tokens_sum"] > 0
    assert page["conserve_row_tokens_total/completion"] == page["conserve_row_completion_tokens_sum"] > 0
    assert page["conserve_shard_seconds_count"] == 1
    assert not any(name.endswith("_created") for name in page)
    assert page["conserve_rows_in_flight"] == 0
    assert page[f"conserve_build_info/run/{__version__}"] == 1


def test_attempts_without_an_answer_are_counted_by_kind(store: Store, write_input: WriteInput) -> None:
    queue_up(store, write_input, "UNAVAILABLE", "REJECT")
    page = harvested_page(store, Script())
    assert page["conserve_attempt_errors_total/unavailable"] == 1
    assert page["conserve_attempt_errors_total/invalid_request"] == 1
    assert page["conserve_row_retries_total"] == 1
    assert page["conserve_rows_total/succeeded"] == page["conserve_rows_total/failed"] == 1
    assert page["conserve_row_latency_seconds_count"] == 1, "of answered rows alone"


def test_an_observer_that_breaks_costs_no_row(
    store: Store, write_input: WriteInput, caplog: pytest.LogCaptureFixture
) -> None:
    queue_up(store, write_input, "a", "b")
    registry = CollectorRegistry()

    class Broken(Observer):
        def __getattribute__(self, name: str) -> Any:
            raise ZeroDivisionError(name)

    async def run() -> None:
        both = Observers([Broken(), HarvestMetrics(registry)])
        clock = asyncio.get_running_loop().time
        await Harvester(store, FakeEndpoint(Script()), clock=clock, observer=both).run(asyncio.Event())

    virtual_time.run(run())
    assert samples(registry)["conserve_row_latency_seconds_count"] == 2
    (warning,) = [record for record in caplog.records if "lost figures" in record.message]
    assert "ZeroDivisionError" in warning.message


MOMENTS: dict[str, tuple[Any, ...]] = {
    "claimed": (["work"],),
    "answered": ("call", "completion"),
    "broke": ("call", ValueError()),
    "committed": ("committed",),
    "moved": ("job", [1, 2]),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_every_observer_hears_of_every_moment(moment: str) -> None:
    heard: list[tuple[object, ...]] = []
    one, other = Observer(), Observer()
    for observer in (one, other):
        setattr(observer, moment, lambda *given, **named: heard.append((*given, named)))
    getattr(Observers([one, other]), moment)(*MOMENTS[moment], begun=1.0, seconds=2.0)
    assert heard == [(*MOMENTS[moment], {"begun": 1.0, "seconds": 2.0})] * 2
    assert getattr(Observer(), moment)(*MOMENTS[moment], begun=1.0, seconds=2.0) is None


def test_the_context_of_a_trace_is_the_first_that_an_observer_has() -> None:
    call = Call(key="a", url=Url.CHAT, body={})
    observers = [Observer(), Observer(), Observer()]
    assert Observers(observers).trace_context(call) is None
    for observer, context in zip(observers[1:], ("first", "second"), strict=True):
        observer.trace_context = lambda call, context=context: context  # type: ignore[method-assign,misc]
    assert Observers(observers).trace_context(call) == "first"


def test_an_observer_that_breaks_is_warned_of_once_a_kind_of_error(caplog: pytest.LogCaptureFixture) -> None:
    errors = [ValueError("one"), ValueError("two"), KeyError("three"), ValueError("four")]

    class Breaks(Observer):
        def trace_context(self, call: Call) -> str | None:
            raise errors.pop(0)

    both = Observers([Breaks()])
    for _ in range(4):
        assert both.trace_context(Call(key="a", url=Url.CHAT, body={})) is None
    assert [record.getMessage() for record in caplog.records] == [
        "Breaks lost figures of a row (ValueError: one)",
        "Breaks lost figures of a row (KeyError: 'three')",
    ]


@pytest.mark.parametrize("error", [None, EndpointBusy("no"), asyncio.CancelledError()])
def test_a_call_is_observed_with_its_moment_its_length_and_its_trace(error: BaseException | None) -> None:
    """The call begins at 1,000 s since 1970 and takes five."""
    heard: list[tuple[str, object, float, float]] = []
    moment = [0.0]

    class Heard(Observer):
        def trace_context(self, call: Call) -> str | None:
            return f"trace of {call.key}"

        def answered(self, call: Call, completion: Any, *, begun: float, seconds: float) -> None:
            heard.append((call.key, completion, begun, seconds))

        def broke(self, call: Call, error: BaseException, *, begun: float, seconds: float) -> None:
            heard.append((call.key, error, begun, seconds))

    class Answers:
        async def complete(self, call: Call, on_tokens: Any) -> object:
            moment[0] += 5.0
            assert (call.traceparent, on_tokens) == ("trace of a", None)
            if error is not None:
                raise error
            return "answer"

    observed = ObservedEndpoint(
        Answers(), Heard(), clock=lambda: 1000.0 + moment[0], monotonic=lambda: moment[0]  # type: ignore[arg-type]
    )  # fmt: skip
    asking = observed.complete(Call(key="a", url=Url.CHAT, body={}))
    with nullcontext() if error is None else pytest.raises(type(error)):
        assert virtual_time.run(asking) == "answer"
    assert heard == [("a", error or "answer", 1000.0, 5.0)]


def test_a_wrapped_endpoint_tells_all_that_the_other_one_tells() -> None:
    told = {name for name in vars(Endpoint) if not name.startswith("_")}
    assert told >= {"identity", "model", "kv_cache", "doing", "in_flight", "notice", "alive", "version"}
    assert vars(WrappedEndpoint).keys() >= told


def test_the_queue_is_read_at_most_so_often(store: Store, write_input: WriteInput) -> None:
    now = [1e9]
    look = StoreLook(load(), lambda: now[0])
    first = look()
    assert first is not None
    assert first.rows_waiting == 0
    queue_up(store, write_input, "a", "b")
    with store.write() as tx:
        harvested.note(tx, 900, since=now[0] - 900.0, now=now[0])
    assert look() is first
    now[0] += KEPT_S
    second = look()
    assert second is not None
    assert (second.rows_waiting, second.states["queued"]) == (2, 1)
    assert second.backlog is not None
    page = samples(new_registry("api", [QueueCollector(look)]))
    assert page["conserve_jobs/queued"] == page["conserve_backlog_jobs"] == 1
    assert page["conserve_rows_waiting"] == 2
    assert page["conserve_backlog_seconds/any"] > 0


def test_the_queue_is_read_again_after_half_a_minute_and_when_the_clock_is_set_back(
    store: Store, write_input: WriteInput
) -> None:
    now = [1e9]
    look = StoreLook(load(), lambda: now[0])
    first = look()
    for seconds, same in ((29.9, True), (0.1, False), (-1.0, False)):
        now[0] += seconds
        seen = look()
        assert (seen is first) is same
        first = seen


def seen_by(foresight: Foresight) -> QueueSeen:
    """The queue of a store that can be read."""
    found = foresight.queue()
    assert found is not None
    return found


def test_figures_of_a_queue_have_its_name_which_no_address_is_in(settings: Settings, store: Store) -> None:
    """The readings of two processes have one name, and those of two stores have two."""
    seen, other = StoreLook(settings)(), StoreLook(load({"home": store.home.parent / "other"}, environ={}))()
    assert seen is not None
    assert seen.name == seen_by(Foresight(store)).name == store.id[:8]
    assert other == QueueSeen(name="")
    page = generate_latest(
        new_registry(None, [QueueCollector(lambda: replace(seen, backlog=BACKLOG))])
    ).decode()
    figures = [line for line in page.splitlines() if line.startswith(("conserve_jobs", "conserve_rows_w"))]
    figures += [line for line in page.splitlines() if line.startswith(("conserve_back", "conserve_dead"))]
    assert len(figures) == len(JobState) + 6
    assert all(f'queue="{seen.name}"' in line for line in figures)


def test_rows_of_paused_jobs_do_not_wait(store: Store, write_input: WriteInput) -> None:
    jobs = [queue_up(store, write_input, *["a"] * rows) for rows in (1, 2)]
    with store.write() as tx:
        catalog.move(tx, jobs[0], "pause", now=0.0)
    seen = StoreLook(load(), lambda: 1e9)()
    assert seen is not None
    assert (seen.rows_waiting, seen.states["paused"], seen.states["queued"]) == (2, 1, 1)
    assert seen.backlog is None, "nothing was harvested yet"
    page = samples(new_registry(None, [QueueCollector(lambda: seen)]))
    assert (page["conserve_backlog_jobs"], page["conserve_rows_waiting"]) == (1, 2)


def test_a_store_that_was_never_read_leaves_the_queue_out_and_tells_since_when() -> None:
    look = StoreLook(load({"store": "postgresql://nobody@127.0.0.1:9/none"}))
    assert look() is None
    now = [50.0]
    registry = new_registry(None, [QueueCollector(look, lambda: now[0])])
    now[0] += 900.0
    shown = {name: value for name, value in samples(registry).items() if name.startswith("conserve_")}
    assert shown == {"conserve_queue_age_seconds": 900.0}


def test_figures_of_before_outlast_the_store_with_their_age() -> None:
    now, looks = [50.0], [QueueSeen(rows_waiting=30), None, QueueSeen(rows_waiting=20)]
    registry = new_registry(None, [QueueCollector(lambda: looks.pop(0), lambda: now[0])])
    for rows, age_s in ((30, 0.0), (30, 600.0), (20, 0.0)):
        page = samples(registry)
        assert (page["conserve_rows_waiting"], page["conserve_queue_age_seconds"]) == (rows, age_s)
        now[0] += 600.0


def test_a_scrape_does_not_wait_for_a_database_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, readings = threading.Event(), iter([30, 20, 20])

    def look() -> QueueSeen:
        rows = next(readings)
        if rows == 20:
            answers.wait()
        return QueueSeen(rows_waiting=rows)

    registry = new_registry(None, [QueueCollector(look)])
    assert samples(registry)["conserve_rows_waiting"] == 30
    with monkeypatch.context() as patched:
        patched.setattr(queue_metrics, "WAIT_S", 0.0)
        for _ in range(2):
            assert samples(registry)["conserve_rows_waiting"] == 30
        assert sum(thread.name == "conserve-queue" for thread in threading.enumerate()) == 1
    answers.set()
    assert samples(registry)["conserve_rows_waiting"] == 20


def test_counters_of_a_harvester_are_those_of_its_tally() -> None:
    tally = Tally(
        succeeded=1, failed=2, late=3, retried=4, prompt_tokens=5, completion_tokens=6, cached_tokens=7,
        resumed_tokens=8, leases_lost=9, in_flight=10, outages=Counter(store=11),
    )  # fmt: skip
    harvester = SimpleNamespace(tally=tally, ready_at=None, endpoint=SimpleNamespace(capacity=64))
    registry = CollectorRegistry()
    registry.register(HarvesterCollector(harvester))  # type: ignore[arg-type]
    found = {name.removeprefix("conserve_"): value for name, value in samples(registry).items()}
    assert found == {
        "rows_total/succeeded": 1, "rows_total/failed": 2, "rows_total/late": 3, "row_retries_total": 4,
        "row_tokens_total/prompt": 5, "row_tokens_total/completion": 6, "row_tokens_total/cached": 7,
        "row_tokens_total/resumed": 8, "leases_lost_total": 9, "rows_in_flight": 10, "outages_total/store": 11,
        "outages_total/endpoint": 0, "rows_in_flight_most": 0, "harvester_waiting": 0,
    }  # fmt: skip
    harvester.ready_at, tally.waiting_for = 1.0, "no server takes rows"
    page = samples(registry)
    assert (page["conserve_rows_in_flight_most"], page["conserve_harvester_waiting"]) == (64, 1)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (asyncio.CancelledError(), "withdrawn"),
        (EndpointBusy("slow down"), "busy"),
        (RequestRejected("no", kind="too_long"), "too_long"),
        (EndpointUnusable("HTTP 401: bad key", status=401), "broken"),
        (ZeroDivisionError(), "broken"),
    ],
)
def test_an_attempt_without_an_answer_has_one_of_few_kinds(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind


def test_the_kinds_of_attempts_in_the_documentation_are_those_that_there_are() -> None:
    _, _, below = (DOCS / "reference/metrics.md").read_text().partition("| `error` of an attempt | means |")
    table = below.partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = [kind for cell in cells for kind in re.findall(r"`(\w+)`", cell)]
    retried = {one.kind for one in RetryableError.__subclasses__()}
    assert sorted(listed) == sorted({WITHDRAWN, BROKEN} | retried | rejections())


def rejections() -> set[str]:
    """Kinds of rejections in the source of what answers requests."""
    found: set[str] = {RequestRejected("").kind}
    for room in ("endpoints", "engine", "jobs"):
        for path in (REPOSITORY / "conserve" / room).rglob("*.py"):
            tree = ast.parse(path.read_text())
            functions = {one.name: one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}
            for call in ast.walk(tree):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "RequestRejected":
                    for keyword in call.keywords:
                        found |= values(keyword.value, functions)
    return found


def values(said: ast.expr, functions: dict[str, ast.FunctionDef]) -> set[str]:
    """Texts that an expression may be, or that the function which it calls may return."""
    if isinstance(said, ast.Constant):
        return {said.value}
    if isinstance(said, ast.IfExp):
        return values(said.body, functions) | values(said.orelse, functions)
    assert isinstance(said, ast.Call), ast.unparse(said)
    returns = [
        one.value for one in ast.walk(functions[ast.unparse(said.func)]) if isinstance(one, ast.Return)
    ]
    return {text for one in returns if one is not None for text in values(one, functions)}


BACKLOG = Backlog(due_s=((3600, 10.0), (14_400, 20.0)), total_s=40.0, load=0.5)


def test_the_page_of_a_queue_has_each_state_and_the_work_by_deadline() -> None:
    seen = QueueSeen(states={JobState.RUNNING: 2}, rows_waiting=30, jobs_waiting=3, backlog=BACKLOG)
    page = samples(new_registry("api", [QueueCollector(lambda: seen)]))
    assert {name: value for name, value in page.items() if name.startswith("conserve_jobs/")} == {
        f"conserve_jobs/{state}": 2 if state is JobState.RUNNING else 0 for state in JobState
    }
    assert {name: value for name, value in page.items() if "backlog" in name or "load" in name} == {
        "conserve_backlog_seconds/1h": 10.0, "conserve_backlog_seconds/4h": 20.0,
        "conserve_backlog_seconds/any": 40.0, "conserve_deadline_load": 0.5, "conserve_backlog_jobs": 3,
    }  # fmt: skip
    assert page["conserve_rows_waiting"] == 30


def families(*registries: Any) -> set[str]:
    """Names of all our metrics as Prometheus knows them."""
    suffix = {"counter": "_total", "info": "_info"}
    return {
        f"{family.name}{suffix.get(family.type, '')}"
        for registry in registries
        for family in registry.collect()
        if family.name.startswith("conserve_")
    }


def test_the_page_of_metrics_has_every_metric_and_no_other(store: Store) -> None:
    pytest.importorskip("vllm")
    from conserve.engine.runtime.traffic import Traffic
    from conserve.engine.vllm.server.metrics import Report, ReportAge
    from tests.unit.test_surface import SAID

    traffic = Traffic()
    traffic.arrived("a", 10, at=0.0)
    traffic.tokens(["a"], at=0.1)
    traffic.tokens(["a"], at=0.2)
    online = {name: traffic.report(now=1.0)["online"][name] for name in ("ttft_ms", "tbt_ms")}
    harvest = new_registry("run")
    HarvestMetrics(harvest)
    harvest.register(HarvesterCollector(Harvester(store, FakeEndpoint(Script()))))
    with store.write() as tx:
        harvested.note(tx, 900, since=1e9 - 900.0, now=1e9)
    api = ApiMetrics(StoreLook(load(), lambda: 1e9), []).registry
    said = of_engine(changed(SAID, {"online": online}))
    found = families(harvest, api, Report(said, {}), ReportAge(0.0))
    page = (DOCS / "reference/metrics.md").read_text()
    assert found == set(re.findall(r"conserve_[a-z_]+", page))


def test_the_page_of_metrics_has_the_bounds_of_the_buckets() -> None:
    """Queries name a bucket by its bound (`le`)."""
    registry = CollectorRegistry()
    HarvestMetrics(registry)
    page = (DOCS / "reference/metrics.md").read_text()
    said = dict(re.findall(r"^\| (.*(?:_seconds`|tokens|rows)) \| ([\d., ]+) \|$", page, re.MULTILINE))
    for family in registry.collect():
        bounds = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
        kind = family.name.rpartition("_")[2]
        name = {"tokens": "the two of tokens", "rows": "the two of rows"}.get(kind, "the other `_seconds`")
        if bounds:
            named = said.get(f"`{family.name}`", said[name])
            assert bounds == [*map(float, named.split(", ")), float("inf")], family.name


def whole_page(store: Store) -> CollectorRegistry:
    """Page of a harvester that has each of its metrics."""
    registry = new_registry("run", [QueueCollector(lambda: QueueSeen(backlog=BACKLOG))])
    metrics = HarvestMetrics(registry)
    metrics.broke(Call(key="a", url=Url.CHAT, body={}), EndpointBusy("no"), begun=0.0, seconds=0.0)
    registry.register(HarvesterCollector(Harvester(store, FakeEndpoint(Script()))))
    return registry


def test_each_metric_is_said_in_a_sentence(store: Store) -> None:
    found = [family for family in whole_page(store).collect() if family.name.startswith("conserve_")]
    said = [family.documentation for family in found]
    assert len(said) == len(set(said)) > 20
    assert all(re.fullmatch(r"[A-Z1].*\.", text) for text in said), said


def test_the_page_of_metrics_has_their_labels(store: Store) -> None:
    page = (DOCS / "reference/metrics.md").read_text()
    said = dict(re.findall(r"(conserve_\w+)\{([\w,]+)\}", page))
    for family in whole_page(store).collect():
        for sample in family.samples:
            if sample.name.startswith("conserve_") and sample.name in page:
                assert ",".join(sample.labels) == said.get(sample.name, ""), sample.name


def test_a_harvester_answers_at_its_port(
    server: ScriptedServer, write_input: WriteInput, tmp_path: Path, forks: Forks
) -> None:
    server.script.pause_at = 3
    submitted = conserve("submit", str(write_input(q=["a", "b"])), "--prompt", "{{ q }}")
    assert submitted.returncode == 0
    words, said = command([], "harvest", "--endpoint", server.url, "--metrics-port", "0"), tmp_path / "said"
    running = forks.start(words, env=os.environ, errors=said)
    until(lambda: server.paused == 2, running)
    (url,) = re.findall(r"\Ametrics at (http://127.0.0.1:\d+/metrics)$", said.read_text(), re.MULTILINE)
    until(lambda: "conserve_jobs{" in read(url), running)
    text = read(url)
    assert "conserve_rows_in_flight 2.0" in text
    assert "conserve_rows_in_flight_most 16.0" in text
    assert re.search(r'^conserve_jobs{queue="\w{8}",state="running"} 1.0$', text, re.MULTILINE)
    assert "process_resident_memory_bytes" in text
    server.script.pause_at = None
    until(lambda: 'conserve_rows_total{outcome="succeeded"} 2.0' in read(url), running)
    running.send_signal(signal.SIGTERM)
    assert ended(running).returncode == 0


def read(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        return str(answer.read().decode())


def test_a_port_in_use_is_named(server: ScriptedServer, write_input: WriteInput) -> None:
    conserve("submit", str(write_input(q=["a"])), "--prompt", "{{ q }}")
    done = conserve("run", "--endpoint", server.url, "--metrics-port", str(server.port))
    assert done.returncode == 2
    assert f"cannot listen at 127.0.0.1:{server.port}" in done.stderr
    assert "--metrics-port" in done.stderr
    assert not server.requests


def test_the_batch_apis_requests_are_counted_without_their_ids(store: Store) -> None:
    from starlette.testclient import TestClient

    from conserve.batch_api.app import application

    with TestClient(application(store), base_url="http://127.0.0.1", client=("127.0.0.1", 1)) as client:
        for path in ("/v1/batches", "/v1/batches/none-such", "/v1/batches/other", "/nowhere"):
            client.get(path)
        text = client.get("/metrics").text
    assert 'conserve_api_requests_total{method="GET",route="/v1/batches",status="200"} 1.0' in text
    assert 'conserve_api_requests_total{method="GET",route="/v1/batches/{id}",status="404"} 2.0' in text
    assert 'conserve_api_requests_total{method="GET",route="other",status="404"} 1.0' in text
    assert 'conserve_api_request_seconds_count{route="/v1/batches/{id}"} 2.0' in text


def test_the_batch_apis_own_figures_outlast_its_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from starlette.testclient import TestClient

    from conserve.batch_api.app import application

    def unreachable(_: Store) -> None:
        raise StoreError("connection refused")

    with TestClient(application(store, open_metrics=True), base_url="http://127.0.0.1") as client:
        with monkeypatch.context() as patched:
            patched.setattr(Store, "read", unreachable)
            page = client.get("/metrics")
        assert page.status_code == 200
        assert "conserve_backlog_jobs" not in page.text
        page = client.get("/metrics")
    assert 'conserve_api_requests_total{method="GET",route="/metrics",status="200"} 1.0' in page.text
    assert "conserve_backlog_jobs{" in page.text


def test_a_known_key_reads_the_page_while_the_store_is_away(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from starlette.testclient import TestClient

    from conserve.batch_api import access, app, reads

    async def unreachable(*_: object) -> None:
        raise StoreError("connection refused")

    with store.write() as tx:
        key = {"Authorization": f"Bearer {keys.add(tx, 'prometheus', project='none', now=0.0)}"}
    monkeypatch.setattr(access, "KEPT_S", 0.0)
    with TestClient(app.application(store)) as client:
        assert client.get("/metrics", headers=key).status_code == 200
        monkeypatch.setattr(reads.Reads, "rows", unreachable)
        assert client.get("/metrics", headers=key).status_code == 200
        assert client.get("/metrics", headers={"Authorization": "Bearer guess"}).status_code == 401
        assert client.get("/v1/batches", headers=key).status_code == 503
    with TestClient(app.application(store)) as client:
        assert client.get("/metrics", headers=key).status_code == 503, "no key was ever read"
    with TestClient(app.application(store, beside=True)) as client:
        assert client.get("/metrics", headers={CALLER_HEADER: SaidOf.KEYED}).status_code == 200


def test_requests_that_are_refused_without_a_key_are_counted_by_their_route(store: Store) -> None:
    from starlette.testclient import TestClient

    from conserve.batch_api.app import application

    with store.write() as tx:
        keys.add(tx, "one", project="default", now=0.0)
    with TestClient(application(store, open_metrics=True), base_url="http://127.0.0.1") as client:
        for path in ("/v1/batches", "/v1/batches/one", "/v1/batches/two", "/v1/nowhere", "/v1/batches/"):
            assert client.get(path).status_code == 401
        client.put("/v1/files/one")
        text = client.get("/metrics").text
    counted = dict(re.findall(r'requests_total{method="\w+",route="(.*)",status="401"} (.*)', text))
    assert counted == {
        "/v1/batches": "1.0",
        "/v1/batches/{id}": "2.0",
        "/v1/files/{id}": "1.0",
        "other": "2.0",
    }


def test_a_job_runs_while_rows_of_it_are_leased(store: Store, write_input: WriteInput) -> None:
    job_id = queue_up(store, write_input, "a", "b")
    now = [1e9]
    foresight = Foresight(store, lambda: now[0])
    assert seen_by(foresight).states == {"queued": 1}
    with store.write() as tx:
        jobs = queue.runnable_jobs(tx, None)
        queue.claim(tx, Terms("me", now[0] + KEPT_S, 60.0, None), jobs, limit=1)
    now[0] += KEPT_S
    assert seen_by(foresight).states == {"running": 1}
    assert StoreLook(load(), lambda: now[0])() == foresight.queue()
    now[0] += 100.0
    assert seen_by(foresight).states == {"queued": 1}, job_id


def test_beside_a_live_server_the_page_has_no_figures_of_the_process() -> None:
    names = samples(ApiMetrics(QueueSeen, [], beside=True).registry)
    assert not any(name.startswith(("process_", "conserve_build")) for name in names)
    assert "conserve_rows_waiting" in names


# Traces.


def test_a_row_is_one_trace_from_submit_to_shard(
    server: ScriptedServer, collector: OtlpReceiver, write_input: WriteInput
) -> None:
    job_id = conserve("submit", str(write_input(q=["a", "b"])), "--prompt", "{{ q }}").stdout.strip()
    done = conserve("run", "--endpoint", server.url, "--otlp-endpoint", collector.url)
    assert done.returncode == 0, done.stderr
    assert collector.paths == {"/v1/traces"}
    roots = collector.named("row")
    assert len({root.trace_id for root in roots}) == len(roots) == 2
    assert {root.service for root in roots} == {"conserve"}
    for root in roots:
        assert root.parent_id == ""
        assert root.attributes["conserve.job"] == job_id
        assert root.attributes["conserve.attempt"] == 1
        below = {span.name: span for span in collector.spans if span.parent_id == root.span_id}
        assert below.keys() == {"lease", "ask", "answer", "journal", "shard"}
        assert {span.trace_id for span in below.values()} == {root.trace_id}
        assert {span.attributes["conserve.row"] for span in below.values()} == {
            root.attributes["conserve.row"]
        }
        assert below["ask"].attributes["gen_ai.usage.output_tokens"] == 8
        order = [below[name].start_ns for name in ("lease", "ask", "answer", "journal", "shard")]
        assert order == sorted(order)
        assert root.start_ns <= below["lease"].start_ns
        assert root.end_ns == below["journal"].end_ns
    asked = {f"00-{span.trace_id}-{span.span_id}-01" for span in collector.named("ask")}
    assert {request.traceparent for request in server.requests} == asked


def test_attempts_of_a_row_are_in_one_trace(
    server: ScriptedServer, collector: OtlpReceiver, write_input: WriteInput
) -> None:
    conserve("submit", str(write_input(q=["FAULT"])), "--prompt", "{{ q }}")
    assert conserve("run", "--endpoint", server.url, "--otlp-endpoint", collector.url).returncode == 0
    first, second = collector.named("ask")
    assert (first.failed, second.failed) == (True, False)
    assert (first.attributes["conserve.attempt"], second.attributes["conserve.attempt"]) == (1, 2)
    assert first.attributes["error.type"] == "endpoint_fault"
    (root,) = collector.named("row")
    assert {span.trace_id for span in collector.spans} == {root.trace_id}
    assert root.attributes["conserve.attempts"] == 2


def test_the_trace_of_a_row_that_failed_says_why(collector: OtlpReceiver, write_input: WriteInput) -> None:
    conserve("submit", str(write_input(q=["REJECT", "a"])), "--prompt", "{{ q }}")
    conserve("run", "--endpoint", "fake:", "--otlp-endpoint", collector.url)
    failed, whole = sorted(collector.named("row"), key=lambda root: not root.failed)
    assert (failed.failed, whole.failed) == (True, False)
    assert failed.attributes["error.type"] == "invalid_request"
    assert "error.type" not in whole.attributes


def test_the_standard_variables_name_the_collector_and_the_share(
    server: ScriptedServer, collector: OtlpReceiver, write_input: WriteInput
) -> None:
    conserve("submit", str(write_input(q=[f"row {n}" for n in range(40)])), "--prompt", "{{ q }}")
    done = conserve(
        "run",
        "--endpoint",
        server.url,
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        OTEL_SERVICE_NAME="nightly",
        OTEL_TRACES_SAMPLER="parentbased_traceidratio",
        OTEL_TRACES_SAMPLER_ARG="0.5",
    )
    assert done.returncode == 0
    roots = collector.named("row")
    assert 0 < len(roots) < 40
    assert {root.service for root in roots} == {"nightly"}
    assert len(collector.spans) == 6 * len(roots), "a row is kept or dropped as a whole"
    assert sum(request.traceparent is not None for request in server.requests) == len(roots)


def test_a_collector_that_fails_costs_no_row(
    server: ScriptedServer, collector: OtlpReceiver, write_input: WriteInput
) -> None:
    collector.status = 400
    conserve("submit", str(write_input(q=["a", "b"])), "--prompt", "{{ q }}")
    done = conserve("run", "--endpoint", server.url, "--otlp-endpoint", collector.url)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 rows done" in done.stderr


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_traces_are_sent_on_request(variables: dict[str, str], wanted: bool) -> None:
    assert otlp.is_wanted(load(), variables) is wanted
    assert otlp.is_wanted(load({"otlp_endpoint": "http://c:4318"}), variables) is True


@pytest.mark.parametrize("package", ["no_such_package", "no_such_package.inner"])
def test_without_the_packages_a_flag_is_refused_and_a_variable_passed_over(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr(otlp, "PACKAGES", (package,))
    said: list[str] = []
    with pytest.raises(SettingsError, match=r"otel"):
        otlp.open_tracer(load({"otlp_endpoint": "http://c:4318"}), {}, say=said.append)
    assert otlp.open_tracer(load(), {}, say=said.append) is None
    assert "otel" in said[0]


def test_traces_url_is_a_collectors_or_that_of_its_traces() -> None:
    assert otlp.traces_url("http://c:4318/") == otlp.traces_url("http://c:4318/v1/traces")
    assert conserve("run", "--otlp-endpoint", "c:4318").returncode == 2


def test_nothing_is_imported_for_what_is_not_asked_for(store: Store, write_input: WriteInput) -> None:
    queue_up(store, write_input, "a")
    code = (
        "import sys; sys.argv[1:] = ['run', '--endpoint', 'fake:']\n"
        "from conserve.cli.app import main\n"
        "assert main() == 0\n"
        "print(*{name.partition('.')[0] for name in sys.modules} & {'opentelemetry', 'prometheus_client'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "CONSERVE_FAKE": "1"},
    )
    assert done.stdout.strip() == ""
