"""Tensors that ranks divide: their shards in a checkpoint, by torch.distributed.checkpoint (DCP).

Owns the plan of each rank's shards, the metadata of their files, and reading any range of them. The
format is that of DCP's HuggingFaceStorageWriter: safetensors, with the offsets of each shard in the
header. So a world of any size reads the shards of any other, and no pickle is read. DCP's own
writers are not used: they write, or pickle to another process, while training waits.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from forge.core.errors import DataLoss

_SHARDING = "DCP_SHARDING_INFO"
"""Key of the offsets in the header of a file, as DCP's HuggingFaceStorageReader reads it."""
_OFFSETS = "saved_offsets"

# Said for each plan and each read of one rank, which is what is wanted here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's part of a tensor, in host memory."""

    name: str
    offsets: tuple[int, ...]
    """Place in the whole tensor."""
    data: Tensor


def _pageable(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def copy_shards(
    tensors: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    copy: Callable[[Tensor], Tensor] = _pageable,
) -> list[Shard]:
    """Copies of this rank's shards of `tensors`; together the ranks of `group` have each element
    once. All ranks call it with the same names; None is a world of one. `copy` makes a contiguous
    copy in host memory.

    Raises `RuntimeError` when a rank fails.
    """
    copies = _HostCopies(copy)
    with _as_error(RuntimeError):
        save(dict(tensors), storage_writer=copies, process_group=group, no_dist=group is None)
    return copies.shards


class _HostCopies(StorageWriter):
    """Copies what DCP would write to host memory."""

    def __init__(self, copy: Callable[[Tensor], Tensor]) -> None:
        self.shards: list[Shard] = []
        self._copy = copy

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for item in plan.items:
            about = item.tensor_data
            assert about is not None, "tensors alone"
            found = planner.resolve_data(item)
            assert isinstance(found, Tensor), "tensors alone"
            data = self._copy(found)
            offsets = tuple(about.chunk.offsets)
            self.shards.append(Shard(name=item.index.fqn, offsets=offsets, data=data))
            results.append(
                WriteResult(index=item.index, size_in_bytes=data.nbytes, storage_data=None)
            )
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to do, like the next ones: a save copies and writes nothing."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def places_in_whole(shards: Sequence[Shard]) -> dict[str, str]:
    """Metadata for the file of one rank's shards."""
    offsets = {one.name: {_OFFSETS: one.offsets} for one in shards}
    return {_SHARDING: json.dumps(offsets)}


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write a safetensors file. Raises `OSError`."""
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(0, str(error)) from error


class _Reader(HuggingFaceStorageReader):
    """Reads the tensors of some files of a directory, whole or in shards."""

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(path=str(files[0].parent))
        self.fs = _Files(files)


class _Files(FileSystem):
    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def ls(self, path: Any) -> list[str]:
        return [str(file) for file in self._files]


def sizes_in(files: Sequence[Path]) -> dict[str, list[int]]:
    """Shapes of the whole tensors in safetensors files, by name; reads their headers alone.

    Raises `OSError` and `SafetensorError` for damaged files.
    """
    return {name: list(about.size) for name, about in _described(files).items()}


def types_in(files: Sequence[Path]) -> dict[str, torch.dtype]:
    """Types of the tensors in safetensors files, by name; as `sizes_in`."""
    return {name: about.properties.dtype for name, about in _described(files).items()}


def _described(files: Sequence[Path]) -> dict[str, TensorStorageMetadata]:
    if not files:
        return {}
    found: dict[str, Any] = _Reader(files).read_metadata().state_dict_metadata
    return found


@torch.no_grad()
def fill(tensors: Mapping[str, Tensor], files: Sequence[Path]) -> None:
    """Fill tensors, which may be sharded, from the files that have them; reads their ranges alone,
    and converts types. No communication.

    Raises `DataLoss` for damaged files, and files without one of the tensors or of another shape.
    """
    if not tensors:
        return
    if not files:
        raise DataLoss(f"no file has {next(iter(tensors))}")
    with _as_error(DataLoss):
        load(dict(tensors), storage_reader=_Reader(files), no_dist=True)


@contextmanager
def _as_error(kind: type[Exception]) -> Iterator[None]:
    """DCP's exception is no `Exception`."""
    try:
        yield
    except CheckpointException as error:
        reasons = [
            f"rank {rank}: {type(reason).__name__}: {reason}"
            for rank, (reason, _) in sorted(error.failures.items())
        ]
        raise kind("; ".join(reasons)) from error
