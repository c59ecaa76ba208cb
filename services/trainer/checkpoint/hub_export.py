"""Writes the model of a checkpoint with the names and shapes of the hub, as `save_pretrained` does.

    python -m services.trainer.checkpoint.hub_export CHECKPOINT OUT

A process of its own for `forge model export`, which runs without torch. It prints one JSON object,
an `ExportOutcome`. Owns the files of the result; `forge.rl.model.hub_names` owns the conversion.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forge.core.errors import InvalidArgument
from forge.rl.model.hub_names import HubNames
from forge.runtime.files.sync import sync
from forge.runtime.weights import digest_of
from services.trainer.checkpoint.files import (
    HEADS_FILE,
    INDEX_FILE,
    MODEL_FILE,
    PUBLISHED_FILE,
    digest_of_files,
    raw_bytes,
)
from services.trainer.checkpoint.reading import model_files, read_heads
from services.trainer.checkpoint.shards import save_tensors

FILE_BYTES = 5 << 30
"""Most bytes of a file with several tensors."""


class ExportOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an export."""

    written: bool = False
    """The model is in OUT, with another published.json. Otherwise nothing is."""
    reason: str = ""
    """Why its names cannot be those of the hub; "" if they are."""
    error: str = ""
    """Why OUT cannot be written."""


def export(checkpoint: Path, out: Path, *, file_bytes: int = FILE_BYTES) -> ExportOutcome:
    """Write the model into the directory `out`, unless the hub has its names."""
    try:
        hub = HubNames.of(checkpoint)
        if hub.own:
            return ExportOutcome()
        about = json.loads((checkpoint / PUBLISHED_FILE).read_text(encoding="utf-8"))
        heads = read_heads(checkpoint)
        own = [name for name in about["tensor_names"] if name not in heads]
    except (InvalidArgument, OSError, ValueError, KeyError) as error:
        return ExportOutcome(reason=f"{type(error).__name__}: {error}")
    try:
        with ExitStack() as stack:
            read = _Reader(model_files(checkpoint), stack)
            files = _write(hub, own, read, out, dtype=about["dtype"], file_bytes=file_bytes)
        _describe(about, files, heads, out)
    except OSError as error:
        return ExportOutcome(error=error.strerror or str(error))
    return ExportOutcome(written=True)


class _Reader:
    """Reads single tensors of some files."""

    def __init__(self, files: Sequence[Path], stack: ExitStack) -> None:
        """Raises `OSError`."""
        self._files: dict[str, Any] = {}
        for file in files:
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
            except SafetensorError as error:
                raise OSError(0, f"{file}: {error}") from error
            self._files |= dict.fromkeys(opened.keys(), opened)

    def __call__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def shape(self, name: str) -> list[int]:
        """The shape of a tensor; reads no data."""
        shape: list[int] = self._files[name].get_slice(name).get_shape()
        return shape


def _write(
    hub: HubNames, own: Sequence[str], read: _Reader, out: Path, *, dtype: str, file_bytes: int
) -> dict[str, dict[str, Any]]:
    """Write the tensors in files of at most `file_bytes`; return names and digest of each file."""
    empty = {
        name: torch.empty(read.shape(name), dtype=getattr(torch, dtype), device="meta")
        for name in own
    }
    sizes = [one.nbytes for _, one in hub.converted(own, empty.__getitem__)]
    names = _file_names(sizes, file_bytes)
    files: dict[str, dict[str, Any]] = {}
    for file, tensors in _groups(hub.converted(own, read), names):
        save_tensors(tensors, out / file)
        sync(out / file)
        digest = digest_of(map(raw_bytes, tensors.values()))
        size = sum(one.nbytes for one in tensors.values())
        files[file] = {"names": [*tensors], "digest": digest, "bytes": size}
    return files


def _file_names(sizes: Sequence[int], file_bytes: int) -> list[str]:
    """The file of each tensor, in order."""
    numbers, number, filled = [], 0, 0
    for size in sizes:
        if filled and filled + size > file_bytes:
            number, filled = number + 1, 0
        filled += size
        numbers.append(number)
    if not number:
        return [MODEL_FILE] * len(sizes)
    return [f"model-{one + 1:05d}-of-{number + 1:05d}.safetensors" for one in numbers]


def _groups(
    tensors: Iterator[tuple[str, Tensor]], files: Sequence[str]
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Tensors of one file at a time."""
    group: dict[str, Tensor] = {}
    for number, (name, tensor) in enumerate(tensors):
        group[name] = tensor
        if number + 1 == len(files) or files[number + 1] != files[number]:
            yield files[number], group
            group = {}


def _describe(
    about: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]],
    heads: Mapping[str, Tensor],
    out: Path,
) -> None:
    """Write published.json, and the index of several files."""
    digests = {name: one["digest"] for name, one in files.items()}
    weight_map = {name: file for file, one in files.items() for name in one["names"]}
    if len(files) > 1:
        size = sum(one["bytes"] for one in files.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (out / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    if heads:
        digests[HEADS_FILE] = digest_of(map(raw_bytes, heads.values()))
    found = {
        "dtype": about["dtype"],
        "files": digests,
        "digest": digest_of_files(digests),
        "published_digest": about["digest"],
        "tensor_names": [*weight_map, *heads],
    }
    (out / PUBLISHED_FILE).write_text(json.dumps(found), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="services.trainer.checkpoint.hub_export")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    chosen = parser.parse_args(arguments)
    print(msgspec.json.encode(export(chosen.checkpoint, chosen.out)).decode())


if __name__ == "__main__":
    main()
