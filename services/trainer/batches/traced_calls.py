"""The trace contexts of a batch, and the spans of the step that trained it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forge.runtime.tracing import start_root, start_span
from forge.runtime.tracing.traceparent import is_sampled, read_traceparent
from forge.v1 import common_pb2


def traced_calls(groups: Iterable[Iterable[common_pb2.Trajectory]]) -> tuple[str, ...]:
    """Return the traceparent of the last model call of each trace in a batch."""
    last: dict[int, str] = {}
    for group in groups:
        for trajectory in group:
            for turn in trajectory.turns:
                context = read_traceparent(turn.traceparent)
                if context is not None and context.sampled:
                    last[context.trace_id] = turn.traceparent
    return tuple(last.values())


def report_step(
    traceparents: Sequence[str], *, step: int, weight_version: int, began_unix_s: float
) -> None:
    """Export the span of a committed step, and below the last call of each trace one that is linked
    to it. `weight_version`: of the weights before the step."""
    if not any(map(is_sampled, traceparents)):
        return
    facts = {"forge.step": step, "forge.weight_version": weight_version}
    trained = start_root("train_step", links=traceparents, start_unix_s=began_unix_s)
    trained.set(facts)
    for traceparent in traceparents:
        span = start_span(
            "train_rollout",
            parent=traceparent,
            attributes=facts,
            links=(trained.traceparent,),
            start_unix_s=began_unix_s,
        )
        span.end()
    trained.end()
