"""Spans through the OpenTelemetry SDK to an OTLP collector over gRPC.

The only module that imports OpenTelemetry. A thread of the SDK exports; a span beyond the queue is
dropped and counted, as are those that the collector did not take.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from forge.core.errors import ConfigError, ForgeError
from forge.core.extras import DISTRIBUTION
from forge.runtime.telemetry import log
from forge.runtime.tracing import Span, SpanRole, Value
from forge.runtime.tracing.metrics import DROPPED, EXPORTED
from forge.runtime.tracing.traceparent import TraceContext, read_traceparent

EXPORT_S = 5.0
"""Longest time of one export, with its repetitions."""
DELAY_S = 1.0
"""Longest time that a span waits for others."""
BATCH_SPANS = 512
STOP_S = 2.0
"""Longest wait for the collector when the process stops."""
MOST_LINKS = 128

_identity: ContextVar[TraceContext | None] = ContextVar("forge_span_identity", default=None)


class Exporting:
    """The tracer of this process."""

    def __init__(
        self, service: str, instance_id: str, *, cluster: str, endpoint: str, queue_spans: int
    ) -> None:
        """Raises ConfigError for an endpoint that is no http:// or https:// address."""
        if not endpoint.startswith(("http://", "https://")) or not endpoint.rpartition("//")[2]:
            raise ConfigError(
                f"tracing.endpoint = {endpoint!r} is not allowed: http://host:4317, or https://"
            )
        # Its failures are counted, and logged here once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
        resource = Resource(
            {
                "service.name": f"forge-{service}",
                "service.namespace": "forge",
                "service.instance.id": instance_id,
                "service.version": _version(),
                "forge.cluster": cluster,
            }
        )
        otlp = OTLPSpanExporter(
            endpoint=endpoint,
            insecure=endpoint.startswith("http://"),
            timeout=EXPORT_S,
            # As channels between services: no proxy of the environment.
            channel_options=(("grpc.enable_http_proxy", 0),),
        )
        self._exporter = _CountingExporter(otlp, endpoint)
        self._processor = _BoundedProcessor(self._exporter, queue_spans)
        provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=resource,
            shutdown_on_exit=False,
            id_generator=_GivenIds(),
            span_limits=SpanLimits(max_links=MOST_LINKS),
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("forge")
        log.info("tracing", endpoint=endpoint)

    def start(
        self,
        name: str,
        *,
        kind: SpanRole = SpanRole.INTERNAL,
        parent: str = "",
        attributes: Mapping[str, Value] | None = None,
        links: Iterable[str] = (),
        start_unix_s: float | None = None,
        identity: str = "",
    ) -> Span:
        """Start a span below `parent`; "": a new trace. `identity`: the traceparent that the span
        itself gets."""
        above = _context(parent)
        token = _identity.set(read_traceparent(identity))
        try:
            span = self._tracer.start_span(
                name,
                context=set_span_in_context(NonRecordingSpan(above)) if above else {},
                kind=SpanKind[kind.value],
                attributes=attributes,
                links=[Link(one) for one in map(_context, links) if one is not None],
                start_time=None if start_unix_s is None else int(start_unix_s * 1e9),
            )
        finally:
            _identity.reset(token)
        return _RecordedSpan(span)

    def stop(self) -> None:
        """Export what waits; a collector that does not answer ends this after `STOP_S`."""
        # The processor's own limit is half a minute.
        flush = threading.Thread(target=self._processor.shutdown, name="spans", daemon=True)
        flush.start()
        flush.join(STOP_S)
        self._exporter.shutdown()


class _RecordedSpan:
    """A span of the SDK."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: Any) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = str(TraceContext(context.trace_id, context.span_id, True))

    def set(self, attributes: Mapping[str, Value]) -> None:
        self._span.set_attributes(attributes)

    def fail(self, error: BaseException) -> None:
        code = error.code if isinstance(error, ForgeError) else type(error).__name__
        self._span.set_attribute("error.type", code)
        self._span.set_status(Status(StatusCode.ERROR))

    def end(self) -> None:
        if self._span.is_recording():
            self._span.end()


class _GivenIds(RandomIdGenerator):  # type: ignore[misc]  # untyped where it is not installed
    """Random ids, but for the root of a rollout."""

    def generate_trace_id(self) -> int:
        given = _identity.get()
        return given.trace_id if given else super().generate_trace_id()

    def generate_span_id(self) -> int:
        given = _identity.get()
        return given.span_id if given else super().generate_span_id()


class _CountingExporter(SpanExporter):  # type: ignore[misc]  # untyped where it is not installed
    """Counts spans, and logs the beginning and the end of a failure."""

    def __init__(self, inner: OTLPSpanExporter, endpoint: str) -> None:
        self._inner = inner
        self._endpoint = endpoint
        self._fails = False
        self.waiting = 0
        """Spans in the queue and in export."""
        self.lock = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._inner.export(spans)
        except Exception:
            # A fault of the library must not end its thread.
            result = SpanExportResult.FAILURE
        with self.lock:
            self.waiting -= len(spans)
        taken = result is SpanExportResult.SUCCESS
        if taken:
            EXPORTED.inc(len(spans))
        else:
            DROPPED.labels("collector").inc(len(spans))
        if taken == self._fails:
            self._fails = not taken
            if taken:
                log.info("spans_exported_again", endpoint=self._endpoint)
            else:
                log.warning("spans_not_exported", endpoint=self._endpoint)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown(timeout_millis=0)


class _BoundedProcessor(BatchSpanProcessor):  # type: ignore[misc]  # untyped where it is not installed
    """Drops new spans while its queue is full."""

    def __init__(self, exporter: _CountingExporter, queue_spans: int) -> None:
        super().__init__(
            exporter,
            max_queue_size=queue_spans,
            schedule_delay_millis=DELAY_S * 1000,
            max_export_batch_size=min(BATCH_SPANS, queue_spans),
        )
        self._counts = exporter
        self._most = queue_spans

    def on_end(self, span: ReadableSpan) -> None:
        with self._counts.lock:
            full = self._counts.waiting >= self._most
            self._counts.waiting += not full
        if full:
            DROPPED.labels("queue_full").inc()
            return
        super().on_end(span)


def _context(traceparent: str) -> SpanContext | None:
    known = read_traceparent(traceparent)
    if known is None:
        return None
    flags = TraceFlags(TraceFlags.SAMPLED if known.sampled else TraceFlags.DEFAULT)
    return SpanContext(known.trace_id, known.span_id, is_remote=True, trace_flags=flags)


def _version() -> str:
    from importlib import metadata

    return metadata.version(DISTRIBUTION)
