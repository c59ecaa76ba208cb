"""Converts hand-offs in shared memory and changes of prefix caches, as `codec` does the others."""

from __future__ import annotations

from collections.abc import Iterator

from forge.core.errors import DataLoss
from forge.core.placement.chains import HASH_BYTES
from forge.v1.inference_pb2 import FetchKvResponse, SharedKv, WatchCacheResponse
from services.inference.codec import read_first, read_state, write_end
from services.inference.engines.base import CacheChange, KvSpan

_MOST_CHAINS = 65_536


def write_shared_span(span: KvSpan, *, name: str, checksum: int) -> FetchKvResponse:
    """Encode a span whose data is in shared memory."""
    response = FetchKvResponse(
        shared=SharedKv(
            name=name,
            bytes=len(span.data),
            xxh3_64=checksum,
            dtype=span.dtype,
            shape=span.shape,
        ),
        from_token=span.from_token,
        tokens=span.tokens,
        weight_version=span.version,
        model_fingerprint=span.fingerprint,
    )
    write_end(span, response)
    return response


def read_shared_span(
    response: FetchKvResponse, data: memoryview, recurrent: bytes | memoryview
) -> KvSpan:
    """Decode a span with this data and these states. Raises DataLoss as `read_state`."""
    return KvSpan(
        from_token=response.from_token,
        tokens=response.tokens,
        version=response.weight_version,
        dtype=response.shared.dtype,
        shape=tuple(response.shared.shape),
        data=data,
        last_state=read_state(response),
        fingerprint=response.model_fingerprint,
        first=read_first(response),
        recurrent=recurrent,
    )


def write_cache_change(change: CacheChange) -> Iterator[WatchCacheResponse]:
    """Encode a change in messages of at most _MOST_CHAINS blocks."""
    stored, removed = list(change.stored), list(change.removed)
    anew = change.anew
    while anew or stored or removed:
        yield WatchCacheResponse(
            anew=anew,
            removed=b"".join(removed[:_MOST_CHAINS]),
            stored=b"" if removed[_MOST_CHAINS:] else b"".join(stored[:_MOST_CHAINS]),
        )
        stored = stored if removed[_MOST_CHAINS:] else stored[_MOST_CHAINS:]
        removed, anew = removed[_MOST_CHAINS:], False


def read_cache_change(response: WatchCacheResponse) -> CacheChange:
    """Decode a change. Raises DataLoss for hashes that are cut."""
    return CacheChange(
        removed=_chains(response.removed), stored=_chains(response.stored), anew=response.anew
    )


def _chains(joined: bytes) -> tuple[bytes, ...]:
    if len(joined) % HASH_BYTES:
        raise DataLoss(f"{len(joined)} bytes are not a whole number of chain hashes")
    return tuple(joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES))
