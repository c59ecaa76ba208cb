"""The span of one answer at the router, from admission to the last token."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from forge.runtime.tracing import SpanRole, Value, enter_span, start_span
from forge.v1 import inference_pb2 as pb

Sample = Callable[[pb.SampleRequest], AsyncGenerator[pb.SampleResponse, None]]


async def with_span(
    sample: Sample, request: pb.SampleRequest
) -> AsyncGenerator[pb.SampleResponse, None]:
    """Yield the responses of `sample`. Its calls of workers are below the span: the generator runs
    in the task of its request."""
    span = start_span("sample", kind=SpanRole.SERVER, parent=request.traceparent)
    enter_span(span)
    try:
        async with aclosing(sample(request)) as responses:
            async for response in responses:
                if response.finish_reason:
                    span.set(_facts(response))
                yield response
    except Exception as error:
        span.fail(error)
        raise
    finally:
        span.end()


def _facts(last: pb.SampleResponse) -> dict[str, Value]:
    return {
        "forge.queue_s": last.timings.queue_s,
        "forge.prefill_s": last.timings.prefill_s,
        "forge.decode_s": last.timings.decode_s,
        "forge.cached_tokens": last.cached_tokens,
    }
