"""Starting weights of ranks that shard.

    torchrun --nproc-per-node N -m tests.support.trainer.starts [HIDDEN]

Prints, on rank 0, one JSON object. For each family "<family> equal": 1 if every parameter, buffer
and tie of the sharded start is that of the whole model, bit for bit, on every rank; "<family>
frozen": the same of a frozen model of a directory in bfloat16, types included. With HIDDEN,
the width of a larger model: "whole peak_mb" and "sharded peak_mb", by how much the largest
resident size of a rank grows at the start, and "weights_mb", in float32.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from forge.rl.config import MeshShape
from forge.rl.model.policy import TreePolicy
from forge.rl.parallel.world import World, make_world, whole
from services.trainer.learner.sharded_start import empty_model, fill_shards, place
from services.trainer.model.full_weights import load_model, own_tensors, tied_names
from tests.support.rl.models import tiny_model

FAMILIES = ("llama", "qwen3", "gemma3", "qwen3_moe", "mixtral", "qwen3_next")
"""Tied and untied; buffers that no file has; experts whose names in files are converted."""
CPU = torch.device("cpu")


def sharded(path: Path, world: World, *, frozen: bool = False) -> Any:
    model = _frozen(empty_model(path), path) if frozen else empty_model(path)
    TreePolicy(model).spread(world)
    fill_shards(model, path, world, CPU)
    return model


def _frozen(model: Any, path: Path) -> Any:
    place(model.requires_grad_(False), path, device=CPU, autocast=torch.bfloat16)
    return model


def equal(path: Path, world: World, *, frozen: bool = False) -> bool:
    """On this rank; all ranks gather every tensor."""
    model = sharded(path, world, frozen=frozen)
    expected = _frozen(load_model(path), path) if frozen else load_model(path)
    types = {one.dtype for one in expected.parameters()}
    assert types == ({torch.bfloat16, torch.float32} if frozen else {torch.float32})
    same = tied_names(model) == tied_names(expected)
    own = {name: whole(one.detach()) for name, one in own_tensors(model).items()}
    for found, wanted in (
        (own, own_tensors(expected)),
        (dict(model.named_buffers()), dict(expected.named_buffers())),
    ):
        same &= found.keys() == wanted.keys()
        same &= all(
            found[name].dtype == one.dtype and torch.equal(found[name], one)
            for name, one in wanted.items()
        )
    return same


def peak_mb(path: Path, world: World, *, empty: bool) -> float:
    """Growth of the largest resident size of this process, MB."""
    gc.collect()
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # begin a new peak
    if empty:
        sharded(path, world)
    else:
        TreePolicy(load_model(path)).spread(world)
    status = Path("/proc/self/status").read_text()
    peak_kb = int(status.partition("VmHWM:")[2].split()[0])
    return (peak_kb * 1024 - before) / 1e6


def largest(value: float) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def prepared(folder: Path, hidden: int) -> None:
    """Write the models, as rank 0."""
    for family in FAMILIES:
        tiny_model(family, torch.float32).save_pretrained(folder / family)
        tiny_model(family, torch.bfloat16).save_pretrained(folder / "narrow" / family)
    if hidden:
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=8,
            num_attention_heads=8,
            vocab_size=4096,
        )
        # As hubs have them: to load in float32 makes a copy, where files of that type are mapped.
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "large")


def main() -> None:
    hidden = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    folders: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])
    if dist.get_rank() == 0:
        prepared(folder, hidden)
    dist.barrier()
    world = make_world(MeshShape(dp_shard=ranks), CPU)
    found: dict[str, float] = {}
    for family in FAMILIES:
        found[f"{family} equal"] = 1 - largest(0.0 if equal(folder / family, world) else 1.0)
        narrow = equal(folder / "narrow" / family, world, frozen=True)
        found[f"{family} frozen"] = 1 - largest(0.0 if narrow else 1.0)
    if hidden:
        large = folder / "large"
        found["weights_mb"] = (large / "model.safetensors").stat().st_size * 2 / 1e6
        for way in ("whole", "sharded"):
            found[f"{way} peak_mb"] = largest(peak_mb(large, world, empty=way == "sharded"))
            dist.barrier()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        print(json.dumps(found))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
