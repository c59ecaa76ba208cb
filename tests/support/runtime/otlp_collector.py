"""A collector of traces: OTLP's own service over gRPC, which keeps what it gets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedSpan:
    """One span as it was exported."""

    service: str
    """E.g. forge-gateway."""
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """"" for a root."""
    links: tuple[str, ...]
    """Ids of the linked spans."""
    attributes: dict[str, Any]

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-01"


class Collector(rpc.TraceServiceServicer):  # type: ignore[misc]
    """Receives spans; `spans` has them in the order of arrival."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        self._lock = threading.Lock()

    def Export(
        self, request: pb.ExportTraceServiceRequest, context: Any
    ) -> pb.ExportTraceServiceResponse:
        with self._lock:
            for resource in request.resource_spans:
                service = _attributes(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [_span(service, one) for one in scope.spans]
        return pb.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[CollectedSpan]:
        """The spans of one trace so far."""
        with self._lock:
            return [span for span in self.spans if span.trace_id == trace_id]

    def by_trace(self) -> dict[str, list[CollectedSpan]]:
        with self._lock:
            ids = {span.trace_id: None for span in self.spans}
        return {trace_id: self.trace(trace_id) for trace_id in ids}


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """A running collector, and its address for `tracing.endpoint`."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    rpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def _span(service: str, span: Any) -> CollectedSpan:
    return CollectedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        links=tuple(link.span_id.hex() for link in span.links),
        attributes=_attributes(span.attributes),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
