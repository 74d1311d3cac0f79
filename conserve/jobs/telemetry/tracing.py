"""Traces of rows: one trace a row, from submit to shard, whichever processes and attempts it takes.

    row                 submit ............................................ durable
      lease               [claim]
      ask                        [exchange with the server ....]             traceparent goes along
      answer                                                    [waits]
      journal                                                         [transaction]
      shard                                                                      [file]

Trace and root have ids that follow from the job and the position. So the spans of every attempt, also of another
harvester, are in one trace, and a sampler that goes by the trace's id keeps or drops a row as a whole.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock, Thread
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from conserve import __version__
from conserve.endpoints.protocol import Call, Completion
from conserve.jobs.harvest.observer import Observer
from conserve.jobs.harvest.workload import ReadyRow
from conserve.store.books.journal import Committed, Finished

JOB, POSITION, ROW, ATTEMPT = "conserve.job", "conserve.position", "conserve.row", "conserve.attempt"
NS = 1_000_000_000
MOST_KEPT = 100_000  # rows between lease and shard; of more, the oldest lose their last spans
CLOSE_S = 5.0


class RowIds(RandomIdGenerator):
    """Ids of spans: random, but for roots, whose ids are set before they begin."""

    def __init__(self) -> None:
        self.root: ContextVar[SpanContext | None] = ContextVar("root", default=None)

    def generate_trace_id(self) -> int:
        root = self.root.get()
        return root.trace_id if root is not None else super().generate_trace_id()

    def generate_span_id(self) -> int:
        root = self.root.get()
        return root.span_id if root is not None else super().generate_span_id()


def exporting(url: str | None, *, service: str | None) -> TracerProvider:
    """Provider that sends spans over OTLP in batches; without a URL, where OTEL_* variables say."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    provider = TracerProvider(resource=resource(service), id_generator=RowIds(), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return provider


def resource(service: str | None) -> Resource:
    """Resource that the spans belong to: this service, and OTEL_RESOURCE_ATTRIBUTES."""
    return Resource.create({"service.name": service or "conserve", "service.version": __version__})


@dataclass(slots=True)
class Traced:
    """One row of a trace that is kept."""

    names: Mapping[str, Any]  # attributes of its spans; the work itself holds the prompt
    attempts: int
    submitted_at: float
    root: SpanContext
    ask: Any = None  # span of the exchange under way
    answered_at: float | None = None


class RowTracer(Observer):
    """Makes the spans. Rows that the sampler drops cost one hash."""

    def __init__(self, provider: TracerProvider) -> None:
        assert isinstance(provider.id_generator, RowIds)
        self._provider, self._ids = provider, provider.id_generator
        self._tracer = provider.get_tracer("conserve", __version__)
        self._rows: dict[str, Traced] = {}  # by the key of the call
        # Rows that wait for their shard, by job and position.
        self._durable: dict[tuple[str, int], Traced] = {}
        self._lock = Lock()  # the store's thread adds rows while the event loop looks them up

    def close(self) -> None:
        """Send what is left. The SDK itself would wait half a minute for a collector that is away."""
        ending = Thread(target=self._provider.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(CLOSE_S)

    def claimed(self, works: Sequence[ReadyRow], *, begun: float, seconds: float) -> None:
        for work in works:
            root = self._root(work.job_id, work.row.position)
            if root is None:
                continue
            row = Traced(named(work), work.row.attempts, work.submitted_at, root)
            with self._lock:
                self._rows[key_of(work.job_id, work.row.position, work.epoch)] = row
                while len(self._rows) > MOST_KEPT:
                    self._rows.pop(next(iter(self._rows)))
            self._span("lease", row, begun, seconds)

    def trace_context(self, call: Call) -> str | None:
        """Begin the span of the exchange, whose id the server's own spans have as their parent."""
        row = self._rows.get(call.key)
        if row is None:
            return None
        row.ask = self._tracer.start_span("ask", under(row.root), kind=SpanKind.CLIENT, attributes=row.names)
        context = row.ask.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def answered(self, call: Call, completion: Completion, *, begun: float, seconds: float) -> None:
        row = self._rows.get(call.key)
        if row is None or row.ask is None:
            return
        row.ask.set_attributes(
            {
                "gen_ai.response.model": completion.model,
                "gen_ai.usage.input_tokens": completion.prompt_tokens,
                "gen_ai.usage.output_tokens": completion.completion_tokens,
                "conserve.cached_tokens": completion.cached_tokens,
                "conserve.resumed_tokens": completion.resumed_tokens(call),
            }
        )
        row.ask.end()
        row.answered_at = begun + seconds

    def broke(self, call: Call, error: BaseException, *, begun: float, seconds: float) -> None:
        with self._lock:
            row = self._rows.get(call.key)
        if row is None or row.ask is None:
            return
        row.ask.set_attribute("error.type", str(getattr(error, "kind", type(error).__name__)))
        row.ask.set_status(Status(StatusCode.ERROR, str(error) or type(error).__name__))
        row.ask.end()

    def committed(self, committed: Committed, *, begun: float, seconds: float) -> None:
        for finished in committed.written:
            with self._lock:
                row = self._rows.pop(key_of(finished.job_id, finished.position, finished.epoch), None)
            if row is not None:
                self._durable_row(row, finished, begun, seconds)
        for finished in committed.late:
            with self._lock:
                self._rows.pop(key_of(finished.job_id, finished.position, finished.epoch), None)

    def moved(self, job_id: str, positions: Sequence[int], *, begun: float, seconds: float) -> None:
        for row in filter(None, (self._durable.pop((job_id, position), None) for position in positions)):
            self._span("shard", row, begun, seconds, {"conserve.shard_rows": len(positions)})

    def _durable_row(self, row: Traced, finished: Finished, begun: float, seconds: float) -> None:
        """End the row's root: its result is durable."""
        if row.answered_at is not None:
            self._span("answer", row, row.answered_at, max(0.0, begun - row.answered_at))
        self._span("journal", row, begun, seconds)
        result = finished.result
        ended = {"conserve.attempts": row.attempts}
        token = self._ids.root.set(row.root)
        try:
            root = self._tracer.start_span(
                "row",
                Context(),
                attributes={**row.names, **ended},
                start_time=int(row.submitted_at * NS),
            )
        finally:
            self._ids.root.reset(token)
        if result.failed:
            root.set_attribute("error.type", result.error_type or "")
            root.set_status(Status(StatusCode.ERROR, result.error))
        root.end(int((begun + seconds) * NS))
        self._durable[finished.job_id, finished.position] = row
        while len(self._durable) > MOST_KEPT:  # another process moves them, or none does
            self._durable.pop(next(iter(self._durable)))

    def _span(
        self, name: str, row: Traced, begun: float, seconds: float, more: Mapping[str, Any] | None = None
    ) -> None:
        """Make a span of an interval that is over."""
        attributes = {**row.names, **(more or {})}
        span = self._tracer.start_span(
            name, under(row.root), attributes=attributes, start_time=int(begun * NS)
        )
        span.end(int((begun + seconds) * NS))

    def _root(self, job_id: str, position: int) -> SpanContext | None:
        """Root of a row's trace; None if the sampler drops it."""
        digest = blake2b(f"{job_id}/{position}".encode(), digest_size=24).digest()
        trace_id, span_id = int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:]) or 1
        decided = self._provider.sampler.should_sample(None, trace_id, "row").decision
        if decided is not Decision.RECORD_AND_SAMPLE:
            return None
        return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def key_of(job_id: str, position: int, epoch: int) -> str:
    """Key of a row's call (`Call.key`)."""
    return f"{job_id}/{position}/{epoch}"


def under(root: SpanContext) -> Context:
    """Context of a span below a root."""
    return set_span_in_context(NonRecordingSpan(root), Context())


def named(work: ReadyRow) -> dict[str, Any]:
    """Attributes of all spans of an attempt."""
    return {
        JOB: work.job_id,
        POSITION: work.row.position,
        ROW: work.request.row_index,
        ATTEMPT: work.row.attempts,
    }
