"""Sampled tokens: joins and splits messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from forge.core.token_columns import TOKEN_BYTES
from forge.runtime.rpc.chunks import CHUNK_BYTES
from forge.runtime.rpc.routes import joined_routes, split_routes
from forge.v1.common_pb2 import SampledTokens
from forge.v1.inference_pb2 import SampleResponse

# Each has one entry per token, or a fixed number of them; a protobuf merge would replace it.
_COLUMNS = [
    field.name for field in SampledTokens.DESCRIPTOR.fields if field.type == field.TYPE_BYTES
]


def joined(parts: Sequence[SampledTokens]) -> SampledTokens:
    """Join messages in order."""
    if len(parts) == 1:
        return parts[0]
    return SampledTokens(
        **{name: b"".join(getattr(part, name) for part in parts) for name in _COLUMNS},
        routed_experts=joined_routes(one.routed_experts for one in parts),
    )


def joined_responses(responses: Sequence[SampleResponse]) -> SampleResponse:
    """Join consecutive responses of one answer; the fields of its end come from the last one."""
    if len(responses) == 1:
        return responses[0]
    whole = SampleResponse()
    for response in responses:
        whole.MergeFrom(response)
    whole.tokens.CopyFrom(joined([response.tokens for response in responses]))
    return whole


def split(tokens: SampledTokens, *, max_bytes: int = CHUNK_BYTES) -> Iterator[SampledTokens]:
    """Yield messages of at most `max_bytes`, or of one token; nothing for no tokens. Recorded
    experts come first, in messages of their own, if they do not fit."""
    count = len(tokens.ids) // TOKEN_BYTES
    apart = bool(tokens.routed_experts.ids) and (not count or tokens.ByteSize() > max_bytes)
    if apart:
        for part in split_routes(tokens.routed_experts, max_bytes=max_bytes):
            yield SampledTokens(routed_experts=part)
    if not count:
        return
    widths = {name: len(getattr(tokens, name)) // count for name in _COLUMNS}
    each = max(1, max_bytes // sum(widths.values()))
    if count <= each and not apart:
        yield tokens
        return
    for start in range(0, count, each):
        columns = {
            name: getattr(tokens, name)[start * width : (start + each) * width]
            for name, width in widths.items()
        }
        yield SampledTokens(**columns)
