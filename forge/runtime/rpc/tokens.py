"""Columns over sampled tokens, as they travel."""

from __future__ import annotations

from collections.abc import Sequence

from forge.v1.common_pb2 import SampledTokens

# Each has one entry per token, or a fixed number of them; a protobuf merge would replace it.
_COLUMNS = [
    field.name for field in SampledTokens.DESCRIPTOR.fields if field.type == field.TYPE_BYTES
]


def joined(parts: Sequence[SampledTokens]) -> SampledTokens:
    """One message of several, in order."""
    if len(parts) == 1:
        return parts[0]
    return SampledTokens(
        **{name: b"".join(getattr(part, name) for part in parts) for name in _COLUMNS}
    )
