"""Host memory of one checkpoint, which the process that writes its files reads.

Owns the memory (memfd), its mappings here, its reuse, and the pinning for copies from a GPU. So a
checkpoint is in memory once: the trainer copies tensors into it, and sends the writer process its
descriptor.
"""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from forge.core.errors import ConfigError
from forge.core.named_tensor import SAFETENSORS_DTYPES
from forge.runtime.telemetry import log
from services.trainer.checkpoint.writer import Place

_SEGMENT_BYTES = 1 << 26
_ALIGNED_BYTES = 64
_DTYPES = {getattr(torch, name): short for short, name in SAFETENSORS_DTYPES.items()}
_PORTABLE = 1
"""cudaHostRegisterPortable."""


def require_room(size_bytes: int) -> None:
    """Raises `ConfigError` if this process may not have memory for tensors of that size."""
    _require_file_size(size_bytes + _SEGMENT_BYTES)


def _require_file_size(size_bytes: int) -> None:
    """This memory is a file."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= limit < size_bytes:
        raise ConfigError(
            f"a checkpoint takes {size_bytes >> 20} MiB of shared memory, and files of this "
            f"process are limited to {limit >> 20} MiB: raise it with `ulimit -f unlimited`, or "
            "LimitFSIZE=infinity of a unit"
        )


class SharedMemory:
    """Memory that grows with each tensor; a page takes memory once something is written to it.

    The tensors are valid as long as this object exists.
    """

    def __init__(self, spare: SpareMemory | None = None, *, pinned: bool = False) -> None:
        """The memory is from `spare`, if there is some, and kept there afterwards: to allocate or
        pin pages takes longer than to copy."""
        self._segments = spare.pop() if spare else _Segments(pinned=pinned)
        if spare is not None:
            weakref.finalize(self, _keep, self._segments, spare)
        self._offsets: dict[int, int] = {}

    @property
    def descriptor(self) -> int:
        """The file of the memory."""
        return self._segments.descriptor

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new contiguous tensor in this memory, not initialized. Raises `OSError`, and
        `ConfigError` beyond the limit on files of this process."""
        size_bytes = torch.Size(shape).numel() * dtype.itemsize
        if not size_bytes:
            return torch.empty(shape, dtype=dtype)
        offset, data = self._segments.take(size_bytes)
        self._offsets[data.data_ptr()] = offset
        return data.view(dtype).view(shape)

    def places(self, tensors: Mapping[str, Tensor]) -> list[Place]:
        """Where tensors are, by name. A tensor that is elsewhere is first copied into this memory.
        Raises `OSError`."""
        return [self._place(name, tensor) for name, tensor in tensors.items()]

    def _place(self, name: str, tensor: Tensor) -> Place:
        offset = self._offsets.get(tensor.data_ptr(), -1) if tensor.nbytes else 0
        if offset < 0 or not tensor.is_contiguous():
            copy = self.empty(tensor.shape, tensor.dtype).copy_(tensor)
            offset = self._offsets[copy.data_ptr()]
        return Place(
            name=name,
            dtype=_DTYPES[tensor.dtype],
            shape=tuple(tensor.shape),
            offset=offset,
            size_bytes=tensor.nbytes,
        )


@dataclass(frozen=True, slots=True)
class _Segment:
    offset: int
    """Place in the file."""
    data: Tensor


class _Segments:
    """A file in memory and its mappings: one for each segment by which the file has grown. A large
    tensor has a segment of its own."""

    def __init__(self, *, pinned: bool) -> None:
        self.descriptor = _memory_file()
        self._pinned = pinned
        self._all: list[_Segment] = []
        self._free: dict[int, list[_Segment]] = {}
        """Mapped before, by their bytes."""
        self._current: _Segment | None = None
        self._used_bytes = 0
        """Of the current segment."""
        weakref.finalize(self, os.close, self.descriptor)

    def take(self, size_bytes: int) -> tuple[int, Tensor]:
        """The next bytes, and their offset in the file."""
        if size_bytes > _SEGMENT_BYTES // 4:
            segment = self._segment(_rounded(size_bytes, mmap.ALLOCATIONGRANULARITY))
            return segment.offset, segment.data[:size_bytes]
        if self._current is None or self._used_bytes + size_bytes > _SEGMENT_BYTES:
            self._current, self._used_bytes = self._segment(_SEGMENT_BYTES), 0
        begin = self._used_bytes
        self._used_bytes += _rounded(size_bytes, _ALIGNED_BYTES)
        return self._current.offset + begin, self._current.data[begin : begin + size_bytes]

    def _segment(self, size_bytes: int) -> _Segment:
        if free := self._free.get(size_bytes):
            return free.pop()
        offset = sum(one.data.nbytes for one in self._all)
        _require_file_size(offset + size_bytes)
        os.ftruncate(self.descriptor, offset + size_bytes)
        mapping = mmap.mmap(self.descriptor, size_bytes, offset=offset)
        data = torch.frombuffer(mapping, dtype=torch.uint8)
        self._pinned = self._pinned and _pin(data, self)
        self._all.append(_Segment(offset, data))
        return self._all[-1]

    def begin_again(self) -> None:
        """Use the memory for other tensors."""
        self._current, self._free = None, {}
        for one in self._all:
            self._free.setdefault(one.data.nbytes, []).append(one)


SpareMemory = list[_Segments]
"""Memory between two checkpoints: of one at most."""


def _rounded(size_bytes: int, multiple: int) -> int:
    return -(-size_bytes // multiple) * multiple


def _keep(segments: _Segments, spare: SpareMemory) -> None:
    if not spare:
        segments.begin_again()
        spare.append(segments)


def _memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("forge-checkpoint", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # other systems than Linux
        return os.dup(file.fileno())


def _pin(segment: Tensor, owner: _Segments) -> bool:
    """Let a GPU write into a segment by itself. Without it copies take longer."""
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(cuda.cudaHostRegister(segment.data_ptr(), segment.nbytes, _PORTABLE))
    if error:
        log.warning("host_memory_not_pinned", error=f"cudaHostRegister: error {error}")
        # The next kernel would report this error as its own.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        return False
    end = weakref.finalize(owner, cuda.cudaHostUnregister, segment.data_ptr())
    end.atexit = False  # CUDA may have ended
    return True
