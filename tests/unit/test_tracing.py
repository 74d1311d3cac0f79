"""Spans of rows, without a collector: what each says, and which are made."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, TraceIdRatioBased
from opentelemetry.trace import SpanKind

from conserve import __version__
from conserve.endpoints.protocol import Call, Choice, Completion, Url
from conserve.errors import EndpointFault
from conserve.jobs.harvest.workload import ReadyRow
from conserve.jobs.requests.file import StoredRequest
from conserve.jobs.telemetry import tracing
from conserve.jobs.telemetry.tracing import NS, RowIds, RowTracer
from conserve.store.books.journal import Committed, Finished
from conserve.store.books.leases import LeasedRow
from tests.commands import HANGS_S
from tests.store_rows import result

ANSWER = Completion(
    choices=[Choice(text="a", finish_reason="stop")],
    prompt_tokens=7,
    completion_tokens=5,
    cached_tokens=3,
    model="m",
)


class Traces:
    """A tracer, and rows on their way past it."""

    def __init__(self, sampler: Any = ALWAYS_ON) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(id_generator=RowIds(), sampler=sampler, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = RowTracer(provider)

    def claim(self, position: int = 4, *, epoch: int = 9, attempts: int = 1) -> Call:
        call = Call(key=f"job/{position}/{epoch}", url=Url.CHAT, body={}, resume_from=(1, 2))
        work = ReadyRow(
            job_id="job", epoch=epoch, row=LeasedRow(position, attempts, 0, 11.0),
            request=StoredRequest(position + 100, None, None, "x", None, None), call=call, can_resume=True,
            wants_json=False, submitted_at=10.0,
        )  # fmt: skip
        self.tracer.claimed([work], begun=20.0, seconds=0.5)
        return call

    def commit(self, position: int = 4, *, epoch: int = 9, late: bool = False, failed: bool = False) -> None:
        finished = [Finished(epoch, "job", position, result(position, failed=failed))]
        committed = Committed([], finished, []) if late else Committed(finished, [], [])
        self.tracer.committed(committed, begun=26.0, seconds=0.25)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def names(self) -> list[str]:
        return [span.name for span in self.exporter.get_finished_spans()]


@pytest.fixture
def traces() -> Iterator[Traces]:
    made = Traces()
    yield made
    made.tracer.close()


def times(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / NS, span.end_time / NS


def test_the_spans_of_a_row_are_its_steps_with_their_times(traces: Traces) -> None:
    call = traces.claim()
    context = traces.tracer.trace_context(call)
    traces.tracer.answered(call, ANSWER, begun=21.0, seconds=4.0)
    traces.commit()
    traces.tracer.moved("job", [3, 4], begun=30.0, seconds=1.0)
    assert traces.names() == ["lease", "ask", "answer", "journal", "row", "shard"]
    (root,) = traces.named("row")
    assert (times(root), root.parent, root.status.is_ok) == ((10.0, 26.25), None, True)
    assert root.attributes == {
        "conserve.job": "job", "conserve.position": 4, "conserve.row": 104, "conserve.attempt": 1,
        "conserve.attempts": 1,
    }  # fmt: skip
    steps = {"lease": (20.0, 20.5), "answer": (25.0, 26.0), "journal": (26.0, 26.25), "shard": (30.0, 31.0)}
    for name, interval in steps.items():
        (span,) = traces.named(name)
        assert times(span) == interval
        assert span.parent is not None
        assert (span.parent.span_id, span.context.trace_id) == (root.context.span_id, root.context.trace_id)
    (shard,) = traces.named("shard")
    assert (shard.attributes or {})["conserve.shard_rows"] == 2
    assert (shard.attributes or {})["conserve.row"] == 104
    (ask,) = traces.named("ask")
    assert context == f"00-{root.context.trace_id:032x}-{ask.context.span_id:016x}-01"
    assert ask.kind is SpanKind.CLIENT
    told = {
        name: value for name, value in (ask.attributes or {}).items() if "token" in name or "model" in name
    }
    assert told == {
        "gen_ai.response.model": "m", "gen_ai.usage.input_tokens": 7, "gen_ai.usage.output_tokens": 5,
        "conserve.cached_tokens": 3, "conserve.resumed_tokens": 2,
    }  # fmt: skip


def test_the_ids_of_a_trace_follow_from_the_row_alone(traces: Traces) -> None:
    other = Traces()
    for one, epoch in ((traces, 9), (other, 10)):
        one.claim(epoch=epoch)
        one.commit(epoch=epoch)
        one.claim(5, epoch=epoch)
        one.commit(5, epoch=epoch)
    roots = [[span.context for span in one.named("row")] for one in (traces, other)]
    assert roots[0] == roots[1]
    assert len({context.trace_id for context in roots[0]}) == len({c.span_id for c in roots[0]}) == 2
    leases = [span.context.span_id for one in (traces, other) for span in one.named("lease")]
    assert len(set(leases)) == 4, "those of the steps are random"


def test_an_attempt_that_broke_says_why_and_its_row_goes_on(traces: Traces) -> None:
    first = traces.claim()
    traces.tracer.trace_context(first)
    traces.tracer.broke(first, EndpointFault("garbage"), begun=21.0, seconds=1.0)
    second = traces.claim(epoch=12, attempts=2)
    traces.tracer.trace_context(second)
    traces.tracer.broke(second, ValueError(), begun=21.0, seconds=1.0)
    failed = [(span.attributes or {})["error.type"] for span in traces.named("ask")]
    assert failed == ["endpoint_fault", "ValueError"]
    assert [span.status.description for span in traces.named("ask")] == ["garbage", "ValueError"]
    traces.commit(epoch=12, failed=True)
    assert "answer" not in traces.names()
    (root,) = traces.named("row")
    assert ((root.attributes or {})["error.type"], root.status.description) == ("scripted", "no")
    assert (root.attributes or {})["conserve.attempts"] == 2


def test_a_late_answer_ends_no_row(traces: Traces) -> None:
    traces.claim()
    traces.commit(late=True)
    traces.commit()
    assert traces.names() == ["lease"]
    assert traces.tracer.trace_context(traces.claim(epoch=10)) is not None


def test_calls_that_are_not_traced_pass(traces: Traces) -> None:
    stranger = Call(key="other/1/1", url=Url.CHAT, body={})
    assert traces.tracer.trace_context(stranger) is None
    traces.tracer.answered(stranger, ANSWER, begun=0.0, seconds=1.0)
    traces.tracer.broke(stranger, ValueError(), begun=0.0, seconds=1.0)
    unasked = traces.claim()
    traces.tracer.answered(unasked, ANSWER, begun=0.0, seconds=1.0)
    traces.tracer.broke(unasked, ValueError(), begun=0.0, seconds=1.0)
    traces.tracer.moved("job", [4], begun=0.0, seconds=1.0)
    assert traces.names() == ["lease"]


def test_a_sampler_keeps_a_row_as_a_whole_or_not_at_all() -> None:
    off, half = Traces(ALWAYS_OFF), Traces(TraceIdRatioBased(0.5))
    for one in (off, half):
        for position in range(40):
            call = one.claim(position)
            one.tracer.trace_context(call)
            one.tracer.answered(call, ANSWER, begun=21.0, seconds=1.0)
            one.commit(position)
    assert off.names() == []
    kept = len(half.named("row"))
    assert 8 < kept < 32
    assert all(len(half.named(name)) == kept for name in ("lease", "ask", "answer", "journal"))


def test_of_more_rows_than_are_kept_the_oldest_lose_their_last_spans(
    traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "MOST_KEPT", 2)
    for position in range(3):
        traces.claim(position)
    for position in range(3):
        traces.commit(position)
    assert [(span.attributes or {})["conserve.position"] for span in traces.named("row")] == [1, 2]
    for position in range(3, 5):
        traces.claim(position)
        traces.commit(position)
    traces.tracer.moved("job", range(5), begun=0.0, seconds=1.0)
    assert [(span.attributes or {})["conserve.position"] for span in traces.named("shard")] == [3, 4]


def test_an_answer_that_a_clock_puts_behind_its_commit_waited_for_no_time(traces: Traces) -> None:
    call = traces.claim()
    traces.tracer.trace_context(call)
    traces.tracer.answered(call, ANSWER, begun=21.0, seconds=9.0)
    traces.commit()
    (answer,) = traces.named("answer")
    assert times(answer) == (30.0, 30.0)


def test_spans_are_of_the_service_and_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "zone=b")
    for service, name in ((None, "conserve"), ("nightly", "nightly")):
        provider = tracing.exporting("http://127.0.0.1:9/v1/traces", service=service)
        assert dict(provider.resource.attributes).items() >= {
            "service.name": name, "service.version": __version__, "zone": "b",
        }.items()  # fmt: skip
        provider.shutdown()


def test_a_collector_that_hangs_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, before = threading.Event(), threading.enumerate()
    hanging = Traces()
    monkeypatch.setattr(hanging.tracer._provider, "shutdown", lambda: gate.wait(HANGS_S))
    monkeypatch.setattr(tracing, "CLOSE_S", 0.01)
    hanging.tracer.close()
    (thread,) = [one for one in threading.enumerate() if one.name == "traces" and one not in before]
    gate.set()
    assert thread.daemon, "the process may end before it"
    thread.join()


def test_what_is_left_is_sent_at_the_end(traces: Traces) -> None:
    traces.tracer.close()
    traces.claim()
    assert traces.names() == [], "the exporter has been shut down"
