"""Blocks of keys and values as bytes: a header with layers, shapes and a checksum, then the blocks.

Used on both sides of a hand-off: vLLM's process writes and loads, the worker checks.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import msgspec
import torch
from xxhash import xxh3_64_intdigest

from forge.core.errors import DataLoss
from services.inference.engines.tensor_bytes import DTYPES, from_bytes
from services.inference.engines.vllm.exchange.shared_memory import Address, open_shared

Layer = tuple[str, str, tuple[int, ...]]
"""Name, dtype, and shape of one block."""
Layout = tuple[Layer, ...]
_LENGTH_BYTES = 8


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the bytes."""

    layout: Layout
    blocks: int
    """Number of blocks of each layer."""
    xxh3_64: int
    """Checksum of all bytes after the header."""


def layout_of(caches: Mapping[str, torch.Tensor]) -> Layout:
    """Return the layers of a model in their order."""
    return tuple(
        (name, str(one.dtype).removeprefix("torch."), tuple(one.shape[1:]))
        for name, one in caches.items()
    )


def block_bytes(layout: Layout) -> int:
    """Return the bytes of one block over all layers. Raises DataLoss for an unknown type."""
    return sum(_layer_bytes(layer) for layer in layout)


def fingerprint_of(layout: Layout, *, model: str) -> bytes:
    """Name the layout of a model's blocks; `model`: its architecture."""
    described = msgspec.json.encode((model, layout))
    return b"vllm/1 " + blake2b(described, digest_size=8).digest()


def write_blocks(
    address: Address, caches: Mapping[str, torch.Tensor], blocks: Sequence[int]
) -> None:
    """Copy blocks to shared memory. Raises OSError without room for them, or if its request has
    ended."""
    ids = torch.tensor(blocks, dtype=torch.long)
    parts = [_bytes(one[ids.to(one.device)]) for one in caches.values()]
    data = b"".join(parts)
    header = Header(layout=layout_of(caches), blocks=len(blocks), xxh3_64=xxh3_64_intdigest(data))
    encoded = msgspec.msgpack.encode(header)
    with open_shared(address, "r+b") as file:
        file.write(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded + data)


def load_blocks(
    address: Address, caches: Mapping[str, torch.Tensor], blocks: Sequence[int], *, skipped: int
) -> None:
    """Copy shared memory, but its first `skipped` blocks, into `blocks`. Raises OSError if its
    request has ended, DataLoss."""
    with open_shared(address) as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    header, data = checked(memoryview(mapped))
    if header.layout != layout_of(caches) or header.blocks < skipped + len(blocks):
        raise DataLoss("the keys and values have another layout")
    ids = torch.tensor(blocks, dtype=torch.long)
    start = 0
    for (_, dtype, shape), cache in zip(header.layout, caches.values(), strict=True):
        size = _layer_bytes((_, dtype, shape))
        first = start + skipped * size
        part = data[first : first + len(blocks) * size]
        loaded = from_bytes(part, dtype=dtype, shape=(len(blocks), *shape))
        cache[ids.to(cache.device)] = loaded.to(cache.device)
        start += header.blocks * size


def checked(data: memoryview) -> tuple[Header, memoryview]:
    """Return header and blocks. Raises DataLoss for damage."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    end = _LENGTH_BYTES + length
    try:
        header = msgspec.msgpack.decode(data[_LENGTH_BYTES:end], type=Header)
    except msgspec.MsgspecError as error:
        raise DataLoss(f"keys and values without a header: {error}") from None
    blocks = data[end:]
    if len(blocks) != header.blocks * block_bytes(header.layout):
        raise DataLoss(f"a hand-off of {header.blocks} blocks has {len(blocks)} bytes")
    if xxh3_64_intdigest(blocks) != header.xxh3_64:
        raise DataLoss("keys and values with a wrong checksum")
    return header, blocks


def _layer_bytes(layer: Layer) -> int:
    name, dtype, shape = layer
    if dtype not in DTYPES:
        raise DataLoss(f"keys and values of {name} have type {dtype!r}")
    size = DTYPES[dtype].itemsize
    for one in shape:
        size *= one
    return size


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes()
