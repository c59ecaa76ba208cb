"""The text form of a trace context (W3C Trace Context, version 00), and the context of a rollout.

Pure. A rollout's trace has the same ids in every process, made from its trajectory: so no process
has to hand them to another, and an agent that sends no context is in the trace nevertheless.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

HEADER = "traceparent"
"""Name of the HTTP header and of the gRPC metadata."""
_FORM = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_RATIO_BITS = 64


class TraceContext(NamedTuple):
    """The ids and the decision of one span."""

    trace_id: int
    span_id: int
    sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.sampled:02x}"


def read_traceparent(text: str) -> TraceContext | None:
    """Return the context of a traceparent; None for a text that is none."""
    match = _FORM.fullmatch(text)
    # Version 00 has nothing behind its flags.
    if match is None or (match[1] == "00" and match[5]):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    if not trace_id or not span_id:
        return None
    return TraceContext(trace_id, span_id, bool(int(match[4], 16) & 1))


def is_sampled(text: str) -> bool:
    """Return whether a text is a traceparent of a sampled trace."""
    context = read_traceparent(text) if text else None
    return context is not None and context.sampled


def rollout_traceparent(cluster: str, trajectory_id: str, *, sample_ratio: float) -> str:
    """Return the context of a rollout's root span.

    Sampled as OpenTelemetry's TraceIdRatioBased does: by the low half of the trace id.
    """
    digest = hashlib.sha256(f"{cluster}/{trajectory_id}".encode()).digest()
    trace_id, span_id = int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])
    low = trace_id & ((1 << _RATIO_BITS) - 1)
    sampled = low < round(sample_ratio * (1 << _RATIO_BITS))
    return str(TraceContext(trace_id or 1, span_id or 1, sampled))
