"""Spans of OpenTelemetry, off unless the setting `tracing.endpoint` names a collector.

A span exists only within a traced rollout: its parent is given as a W3C traceparent, or is the
current span of the task. While tracing is off, and for rollouts that are not sampled, each function
returns `NO_SPAN`, and OpenTelemetry is never imported. Export runs on a thread, drops spans beyond
its queue, and never raises.

    traceparent   the text of a trace context, and the context of a rollout
    export        OpenTelemetry: imported by `begin_tracing` alone
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from forge.runtime.tracing.traceparent import is_sampled, rollout_traceparent

if TYPE_CHECKING:
    from forge.runtime.tracing.export import Exporting

__all__ = [
    "NO_SPAN",
    "Kind",
    "Span",
    "as_current",
    "begin_tracing",
    "current_span",
    "enter_span",
    "is_tracing",
    "rollout_parent",
    "span_of_rollout",
    "start_root",
    "start_span",
]

Value = str | bool | int | float | tuple[str, ...]


class SpanRole(Enum):
    """The role of a span, with OpenTelemetry's names."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"


class Span(Protocol):
    """One operation of a trace."""

    @property
    def traceparent(self) -> str:
        """The context for spans below this one; "" if it is not recorded."""

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Add attributes."""

    def fail(self, error: BaseException) -> None:
        """Mark the span as failed, by the type of the error: its text may quote an agent."""

    def end(self) -> None:
        """End the span; only the first call has an effect."""


class _NoSpan:
    """A span that is not recorded."""

    traceparent = ""

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Do nothing."""

    def fail(self, error: BaseException) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


NO_SPAN: Span = _NoSpan()
_backend: Exporting | None = None
_cluster = ""
_sample_ratio = 0.0
_current: ContextVar[Span] = ContextVar("forge_span", default=NO_SPAN)


def begin_tracing(
    service: str,
    instance_id: str,
    *,
    cluster: str,
    endpoint: str,
    sample_ratio: float,
    queue_spans: int,
) -> Callable[[], None]:
    """Export the spans of this process from now on; return a blocking function that ends it.

    Raises ConfigError for an endpoint that is no address, ModuleNotFoundError without the extra.
    """
    global _backend, _cluster, _sample_ratio
    # Late import: it takes a third of a second.
    from forge.runtime.tracing.export import Exporting

    backend = Exporting(
        service, instance_id, cluster=cluster, endpoint=endpoint, queue_spans=queue_spans
    )
    _backend, _cluster, _sample_ratio = backend, cluster, sample_ratio

    def stop() -> None:
        global _backend
        _backend = None
        backend.stop()

    return stop


def is_tracing() -> bool:
    """Return whether this process exports spans."""
    return _backend is not None


def start_span(
    name: str,
    *,
    kind: SpanRole = SpanRole.INTERNAL,
    parent: str = "",
    attributes: Mapping[str, Value] | None = None,
    links: Iterable[str] = (),
    start_unix_s: float | None = None,
) -> Span:
    """Start a span below `parent`, a traceparent, or below the current span; `NO_SPAN` if there is
    none, or it is not sampled."""
    if _backend is None:
        return NO_SPAN
    above = parent or _current.get().traceparent
    if not is_sampled(above):
        return NO_SPAN
    return _backend.start(
        name,
        kind=kind,
        parent=above,
        attributes=attributes,
        links=links,
        start_unix_s=start_unix_s,
    )


def start_root(name: str, *, links: Iterable[str] = (), start_unix_s: float | None = None) -> Span:
    """Start a trace of its own."""
    if _backend is None:
        return NO_SPAN
    return _backend.start(name, links=links, start_unix_s=start_unix_s)


def span_of_rollout(
    name: str, trajectory_id: str, attributes: Mapping[str, Value] | None = None
) -> Span:
    """Start the root of a rollout's trace. All processes know its ids from the trajectory."""
    identity = rollout_parent(trajectory_id)
    if _backend is None or not is_sampled(identity):
        return NO_SPAN
    return _backend.start(name, attributes=attributes, identity=identity)


def rollout_parent(trajectory_id: str) -> str:
    """Return the traceparent of a rollout's root; it says whether the rollout is sampled."""
    return rollout_traceparent(_cluster, trajectory_id, sample_ratio=_sample_ratio)


def current_span() -> Span:
    """Return the span of this task."""
    return _current.get()


def enter_span(span: Span) -> None:
    """Make a span the current one to the end of this task; `NO_SPAN`: none."""
    _current.set(span)


@contextmanager
def as_current(span: Span) -> Iterator[Span]:
    """Make a span the current one for a block, and end it. Not in an asynchronous generator: its
    blocks may end in another task."""
    token = _current.set(span)
    try:
        yield span
    except BaseException as error:
        span.fail(error)
        raise
    finally:
        _current.reset(token)
        span.end()
