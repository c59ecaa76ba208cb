"""Lossless difference of one tensor between two versions: the changed elements alone.

In 16 bits a step at a small learning rate leaves most elements as they are. Blocks of elements; of
each block the gaps between changed elements and their differences as integers, compressed by zlib.
The caller verifies the result by the digests of the manifest. Needs numpy, so that
`forge.runtime.weights` itself does not import this module.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from forge.core.errors import DataLoss
from forge.core.named_tensor import NamedTensor
from forge.runtime.weights.held import HeldWeights

_BLOCK_ITEMS = 1 << 22
_SAMPLED_RUNS, _RUN_ITEMS = 128, 128
"""Compared first: a tensor that changed nearly everywhere costs no more. Single elements, evenly
spread, would read as much memory as all of them."""
_HEAD = struct.Struct("<III")
"""Header of a block: changed elements, bytes of the compressed gaps and of the compressed
differences."""
_LEVEL = 1
_LONGEST_GAP = 255
_MOST = 0.5
"""Share of the data up to which a delta is used: beyond, it saves less than it costs to make."""
_UINTS: Mapping[int, type[np.unsignedinteger]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
}

Items = npt.NDArray[np.unsignedinteger]
Bytes = npt.NDArray[np.uint8]


def item_bytes(shape: tuple[int, ...], size_bytes: int) -> int:
    """Return the size of an element; 1 for an unusual one."""
    items = int(np.prod(shape, dtype=np.int64))
    size = size_bytes // items if items else 1
    return size if size in _UINTS and size * items == size_bytes else 1


def encode(base: bytes | memoryview, new: bytes | memoryview, *, item_bytes: int) -> bytes | None:
    """Return the delta from `base` to `new`, of equal length; None if it is not clearly smaller."""
    kind = _UINTS[item_bytes]
    old_items, new_items = np.frombuffer(base, kind), np.frombuffer(new, kind)
    sampled = _sampled_runs(old_items) != _sampled_runs(new_items)
    if np.count_nonzero(sampled) > _MOST * sampled.size:
        return None
    blocks: list[bytes] = []
    total_bytes = 0
    for start in range(0, len(new_items), _BLOCK_ITEMS):
        old, now = old_items[start : start + _BLOCK_ITEMS], new_items[start : start + _BLOCK_ITEMS]
        at = np.flatnonzero(old != now)
        if len(at) > _MOST * len(now):
            return None
        gaps = _packed(_gap_bytes(at))
        differences = _packed(_planes(_zigzag(now[at] - old[at])))
        blocks += [_HEAD.pack(len(at), len(gaps), len(differences)), gaps, differences]
        total_bytes += _HEAD.size + len(gaps) + len(differences)
        if total_bytes > _MOST * (start + len(now)) * item_bytes:
            return None
    return b"".join(blocks) if total_bytes <= _MOST * len(new) else None


def _sampled_runs(items: Items) -> Items:
    """Evenly spread runs of elements; all elements of a small tensor."""
    distance = len(items) // _SAMPLED_RUNS
    if distance <= _RUN_ITEMS:
        return items
    return items[: distance * _SAMPLED_RUNS].reshape(_SAMPLED_RUNS, distance)[:, :_RUN_ITEMS]


def apply(base: bytes | memoryview, delta: bytes | memoryview, *, item_bytes: int) -> bytearray:
    """Return the new data. Raises `DataLoss` for a delta that is damaged or of another tensor."""
    result = bytearray(base)
    items = np.frombuffer(result, _UINTS[item_bytes])
    view, at = memoryview(delta), 0
    try:
        for start in range(0, len(items), _BLOCK_ITEMS):
            changed, gaps, differences = _HEAD.unpack_from(view, at)
            at += _HEAD.size
            _apply_block(
                items[start : start + _BLOCK_ITEMS],
                changed,
                view[at : at + gaps],
                view[at + gaps : at + gaps + differences],
            )
            at += gaps + differences
    except (struct.error, zlib.error, ValueError, IndexError) as error:
        raise DataLoss(f"the delta is damaged: {error}") from None
    if at != len(view):
        raise DataLoss(f"the delta is damaged: {len(view)} bytes, {at} expected")
    return result


def _apply_block(items: Items, changed: int, gaps: memoryview, differences: memoryview) -> None:
    if changed > len(items):
        raise ValueError(f"{changed} changes of {len(items)} elements")
    where = _positions(_unpacked(gaps, len(items) + changed), changed)
    if changed and where[-1] >= len(items):
        raise ValueError(f"change of element {where[-1]} of {len(items)}")
    planes = _unpacked(differences, changed * items.itemsize)
    zigzag = np.ascontiguousarray(planes.reshape(items.itemsize, changed).T).view(items.dtype)
    items[where] += _unzigzag(zigzag.reshape(changed))


def _packed(data: bytes) -> bytes:
    # Of zlib's strategies the smallest and fastest on such bytes.
    deflater = zlib.compressobj(_LEVEL, strategy=zlib.Z_RLE)
    return deflater.compress(data) + deflater.flush()


def _unpacked(data: memoryview, most_bytes: int) -> Bytes:
    inflater = zlib.decompressobj()
    found = inflater.decompress(data, most_bytes + 1)
    if not inflater.eof or inflater.unused_data:
        raise ValueError("a compressed part has another length")
    return np.frombuffer(found, np.uint8)


def _gap_bytes(at: npt.NDArray[np.int64]) -> bytes:
    """One byte for each 255 of a gap, and one for its rest."""
    gaps = np.diff(at, prepend=-1) - 1
    ends = np.cumsum(gaps // _LONGEST_GAP + 1) - 1
    found = np.full(int(ends[-1]) + 1 if len(ends) else 0, _LONGEST_GAP, np.uint8)
    found[ends] = gaps % _LONGEST_GAP
    return found.tobytes()


def _positions(gaps: Bytes, changed: int) -> npt.NDArray[np.int64]:
    ends = np.flatnonzero(gaps != _LONGEST_GAP)
    if len(ends) != changed or (changed and ends[-1] != len(gaps) - 1):
        raise ValueError(f"{len(ends)} positions of {changed}")
    return np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(changed)


def _zigzag(difference: Items) -> Items:
    """Small numbers for small differences of either sign."""
    bits = difference.dtype.itemsize * 8
    sign = (difference >> difference.dtype.type(bits - 1)).astype(difference.dtype)
    return (difference << difference.dtype.type(1)) ^ (np.zeros_like(sign) - sign)


def _unzigzag(found: Items) -> Items:
    one = found.dtype.type(1)
    return (found >> one) ^ (np.zeros_like(found) - (found & one))


def _planes(items: Items) -> bytes:
    """All lowest bytes first: the others are nearly always 0."""
    rows = items.view(np.uint8).reshape(len(items), items.itemsize)
    return np.ascontiguousarray(rows.T).tobytes()


class DeltaEncoder:
    """The deltas between versions that this process holds, made on demand and kept."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], dict[int, bytes | None]] = {}
        self._lock = asyncio.Lock()

    async def of(
        self,
        held: Mapping[int, HeldWeights],
        base_version: int,
        version: int,
        numbers: Sequence[int],
    ) -> list[bytes | None]:
        """Return the deltas of tensors; None if the base is not held or one is not smaller."""
        async with self._lock:
            for key in [key for key in self._made if key[1] not in held]:
                del self._made[key]
            made = self._made.setdefault((base_version, version), {})
            missing = [number for number in numbers if number not in made]
            if missing:
                found = await asyncio.to_thread(
                    _between, held.get(base_version), held[version], missing
                )
                made.update(zip(missing, found, strict=True))
            return [made[number] for number in numbers]


def _between(
    base: HeldWeights | None, held: HeldWeights, numbers: Sequence[int]
) -> list[bytes | None]:
    if base is None:
        return [None] * len(numbers)
    return [_delta(base.tensor(number), held.tensor(number)) for number in numbers]


def _delta(old: NamedTensor | None, new: NamedTensor | None) -> bytes | None:
    if old is None or new is None:
        return None
    if (old.name, old.dtype, old.shape) != (new.name, new.dtype, new.shape):
        return None
    return encode(old.data, new.data, item_bytes=item_bytes(new.shape, len(new.data)))
