"""Converts hand-offs and changes of prefix caches, as `codec` does the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from xxhash import xxh3_64_intdigest

from forge.core.errors import DataLoss, FailedPrecondition
from forge.core.named_tensor import NamedTensor
from forge.core.placement.chain_hashes import HASH_BYTES
from forge.runtime.rpc import tensors
from forge.runtime.rpc.chunks import Joiner, split
from forge.v1.common_pb2 import Tensor
from forge.v1.inference_pb2 import (
    FetchKvRequest,
    FetchKvResponse,
    KvBlock,
    SharedKv,
    WatchCacheResponse,
)
from services.inference.codec import read_tokens, write_tokens
from services.inference.engines.base import CacheChange, KvSpan, Tokens

_KV = "kv"
_RECURRENT = "recurrent"
_EXPERTS = "experts"
_MAX_SPAN_BYTES = 1 << 40
_MOST_CHAINS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEnd:
    """Separate arrays that come before the span that ends a prompt; see `KvSpan`."""

    recurrent: bytes | memoryview = b""
    routes: bytes | memoryview = b""


def write_span(span: KvSpan, *, slices: bool) -> Iterator[FetchKvResponse]:
    """Encode a span. Raises FailedPrecondition for one above 2 GiB without `slices`."""
    array = NamedTensor(name=_KV, dtype=span.dtype, shape=span.shape, data=span.data)
    if slices:
        for piece in tensors.slices(array):
            response = FetchKvResponse(
                slice=piece,
                from_token=span.from_token,
                tokens=span.tokens,
                weight_version=span.version,
                model_fingerprint=span.fingerprint,
            )
            if piece.offset_bytes + len(piece.data) == piece.whole_bytes:
                write_end(span, response)
            yield response
        return
    tensors.require_serializable(array)
    tensor = Tensor(name=_KV, dtype=span.dtype, shape=span.shape, data=bytes(span.data))
    block = KvBlock(
        from_token=span.from_token, tokens=span.tokens, weight_version=span.version, kv=tensor
    )
    for chunk in split(block.SerializeToString()):
        yield FetchKvResponse(block=chunk)


def write_prompt_end(span: KvSpan, request: FetchKvRequest) -> Iterator[FetchKvResponse]:
    """Encode what comes before a span that ends a prompt: the states of recurrent layers, and the
    experts for a caller that takes them. Raises FailedPrecondition for states without `slices`."""
    if span.recurrent and not request.slices:
        raise FailedPrecondition("the hand-off has recurrent states: set `slices` in the request")
    arrays = {_RECURRENT: span.recurrent}
    if request.slices and request.experts:
        arrays[_EXPERTS] = span.routes
    for name, data in arrays.items():
        if data:
            array = NamedTensor(name=name, dtype="uint8", shape=(len(data),), data=data)
            for piece in tensors.slices(array):
                yield FetchKvResponse(slice=piece)


def write_end(span: KvSpan, response: FetchKvResponse) -> None:
    """Add the other parts of a span: the last hidden state, the first token."""
    if span.first is not None:
        # The experts of the prompt come with the answer to Prefill.
        response.first.CopyFrom(write_tokens(replace(span.first, routes=None)))
    if span.last_state:
        response.last_state = span.last_state
        response.last_state_xxh3_64 = xxh3_64_intdigest(span.last_state)


def kv_bytes(response: FetchKvResponse) -> int:
    """Return the size of the keys and values that begin with a response; 0 if it has none, or if a
    worker of an earlier release does not tell."""
    if response.HasField("shared"):
        return response.shared.bytes
    return response.slice.whole_bytes if response.slice.name == _KV else 0


def ends_span(response: FetchKvResponse) -> bool:
    """Whether the keys and values of a span end with a response."""
    if response.HasField("slice"):
        piece = response.slice
        return piece.name == _KV and piece.offset_bytes + len(piece.data) == piece.whole_bytes
    return response.HasField("shared") or response.block.last


def read_state(response: FetchKvResponse) -> bytes:
    """Return the last hidden state; empty without one. Raises DataLoss for a damaged one."""
    state = response.last_state
    if state and xxh3_64_intdigest(state) != response.last_state_xxh3_64:
        raise DataLoss("last_state is damaged: wrong checksum")
    return state


def read_first(response: FetchKvResponse) -> Tokens | None:
    """Return the first token of the answer; None without one. Raises DataLoss for another number of
    tokens."""
    if not response.HasField("first"):
        return None
    first = read_tokens(response.first)
    if len(first.ids) != 1:
        raise DataLoss(f"first has {len(first.ids)} tokens; prefill samples exactly one")
    return first


class SpanAssembler:
    """Joins the responses of successive spans."""

    def __init__(self) -> None:
        self._slices = tensors.SliceAssembler()
        self._joiner = Joiner()
        self._end = PromptEnd()

    def take_end(self) -> PromptEnd:
        """Take the arrays that came before a span that ends a prompt."""
        end, self._end = self._end, PromptEnd()
        return end

    def add(self, response: FetchKvResponse) -> KvSpan | None:
        """Return the span at its last response. Raises `DataLoss` for a misplaced or damaged
        response."""
        if not response.HasField("slice"):
            whole = self._joiner.add(response.block)
            return None if whole is None else _read_block(whole)
        array = self._slices.add(response.slice, max_bytes=_MAX_SPAN_BYTES)
        if array is None:
            return None
        if array.name == _RECURRENT:
            self._end = replace(self._end, recurrent=array.data)
            return None
        if array.name == _EXPERTS:
            self._end = replace(self._end, routes=array.data)
            return None
        return _span(response, array, array.data, self.take_end())


def _read_block(data: bytes) -> KvSpan:
    block = KvBlock.FromString(data)
    return KvSpan(
        from_token=block.from_token,
        tokens=block.tokens,
        version=block.weight_version,
        dtype=block.kv.dtype,
        shape=tuple(block.kv.shape),
        data=block.kv.data,
    )


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


def read_shared_span(response: FetchKvResponse, data: memoryview, end: PromptEnd) -> KvSpan:
    """Decode a span with this data. Raises DataLoss as `read_state`."""
    return _span(response, response.shared, data, end)


def _span(
    response: FetchKvResponse,
    form: NamedTensor | SharedKv,
    data: bytes | memoryview,
    end: PromptEnd,
) -> KvSpan:
    return KvSpan(
        from_token=response.from_token,
        tokens=response.tokens,
        version=response.weight_version,
        dtype=form.dtype,
        shape=tuple(form.shape),
        data=data,
        last_state=read_state(response),
        fingerprint=response.model_fingerprint,
        first=read_first(response),
        recurrent=end.recurrent,
        routes=end.routes,
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
