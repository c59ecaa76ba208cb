"""The span of one HTTP request of an agent.

An agent's own trace context is kept: the span is below it, and linked to the rollout. Without one
the span is below the root of the rollout's trace.
"""

from __future__ import annotations

from aiohttp import web

from forge.runtime.security.tokens import Claims
from forge.runtime.tracing import (
    NO_SPAN,
    SpanRole,
    current_span,
    enter_span,
    is_tracing,
    rollout_parent,
    start_span,
)
from forge.runtime.tracing.traceparent import HEADER, read_traceparent


def begin_request_span(request: web.Request, claims: Claims, *, route: str) -> None:
    """Starts the span once the rollout is known, if it is traced."""
    if not is_tracing() or not claims.trajectory_id:
        return
    root = rollout_parent(claims.trajectory_id)
    own = request.headers.get(HEADER, "")
    has_own = read_traceparent(own) is not None
    span = start_span(
        f"{request.method} {route}",
        kind=SpanRole.SERVER,
        parent=own if has_own else root,
        attributes={"http.request.method": request.method, "http.route": route},
        links=(root,) if has_own else (),
    )
    enter_span(span)


def end_request_span(status: int) -> None:
    """Ends the span of this task's request. `status`: of the response, 0 for an agent that left."""
    span = current_span()
    if span is NO_SPAN:
        return
    if status:
        span.set({"http.response.status_code": status})
    if status >= 500:
        span.set({"error.type": str(status)})
    span.end()
    # A connection has many requests.
    enter_span(NO_SPAN)
