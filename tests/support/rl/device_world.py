"""Errors of a sharded world of one on a GPU: `torchrun --nproc-per-node 1 -m
tests.support.rl.device_world`.

Prints one JSON object: {case: error}. FSDP2 shards the model over NCCL as with several ranks: each
layer is gathered, and gradients are reduced. Steps are compared with an unsharded learner on the
same device; a checkpoint's shards are read into another model. torch 2.11 lacks two methods of
FSDP2 that `forge.rl.parallel.sharding` needs: one has no effect on one rank, the other is written
out here.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from forge.rl.config import LearnerConfig, MeshShape, OptimizerConfig
from forge.rl.learner.learner import Learner
from forge.rl.model.policy import TreePolicy
from forge.rl.model.recomputation import recompute_activations
from forge.rl.model.served_weights import ServedValues
from forge.rl.parallel.sharding import local
from forge.rl.parallel.world import ShardMeshes, World, whole
from services.trainer.checkpoint.files import Contents
from services.trainer.checkpoint.shards import copy_shards, fill
from tests.support.rl.models import tiny_model
from tests.support.rl.worlds import samples

FAMILIES = ("llama", "qwen3_moe")
"""A head that is the embedding, and experts with routers that are gathered apart."""


class OneShard(MeshShape):
    """A mesh of one rank that shards all the same."""

    sharded = True


def supply_missing() -> None:
    """Stand-ins for the methods that torch 2.11 lacks."""

    def reset_iter_state(module: Any) -> None:
        root = module._get_fsdp_state()
        root._comm_ctx.post_forward_order.clear()
        for one in root._state_ctx.all_states:
            one._modules_to_run_forward.clear()
            if one._fsdp_param_group is not None:
                one._fsdp_param_group.reshard()

    missing = {
        "reset_iter_state": reset_iter_state,
        "set_reduce_scatter_unused_params": lambda *_, **__: None,
    }
    for name, stand_in in missing.items():
        if not hasattr(FSDPModule, name):
            setattr(FSDPModule, name, stand_in)


def world_of(device: torch.device) -> World:
    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("shards",))
    meshes = ShardMeshes(layers=mesh, outside=mesh)
    return World(shape=OneShard(), everyone=dist.group.WORLD, meshes=meshes)


def learner_of(
    family: str, world: World | None, device: torch.device, *, narrow: torch.dtype | None = None
) -> Learner:
    """With bf16 as in a run: layers gathered in bf16, the loss that of published weights."""
    model = tiny_model(family, torch.float32, wide=True).to(device)
    if narrow is not None:
        recompute_activations(model)
    policy = TreePolicy(model, autocast=narrow)
    if world is not None:
        policy.spread(world, narrow=narrow)
    config = LearnerConfig(token_budget=40, optimizer=OptimizerConfig(learning_rate=1e-3))
    served = None
    if narrow is not None:
        served = ServedValues(model, published=narrow, autocast=narrow)
    return Learner(policy, config, served=served)


def step_error(family: str, world: World, device: torch.device) -> float:
    """In fp32: of the weights after two steps, relative to the update, and of the losses."""
    ends, losses = [], []
    for one in (world, None):
        learner = learner_of(family, one, device)
        before = {name: whole(p.detach()).clone() for name, p in named(learner)}
        results = [learner.step(learner.plan(samples()), weight_version=5) for _ in range(2)]
        assert not any(each.skipped for each in results), [each.skipped for each in results]
        losses.append([each.loss for each in results])
        moved = [(whole(p.detach()) - before[name]).flatten() for name, p in named(learner)]
        ends.append(torch.cat(moved))
    sharded, alone = ends
    loss: float = max(abs(one - other) for one, other in zip(*losses, strict=True))
    return max(loss, float((sharded - alone).norm() / alone.norm()))


def narrow_error(family: str, world: World, device: torch.device) -> float:
    """In bf16: of loss and gradient norm; gradients of norms and routers are rounded differently,
    and AdamW's first step is as large for the smallest gradients."""
    results = []
    for one in (world, None):
        learner = learner_of(family, one, device, narrow=torch.bfloat16)
        results.append(learner.step(learner.plan(samples()), weight_version=5))
    found, expected = results
    return max(abs(found.loss - expected.loss), abs(found.grad_norm / expected.grad_norm - 1))


def named(learner: Learner) -> list[tuple[str, Any]]:
    return list(learner.policy.model.named_parameters())


def checkpoint_error(world: World, device: torch.device) -> float:
    """Of weights that were copied as shards, written, and read into a model of zeros."""
    parameters = dict(named(learner_of("llama", world, device)))
    other = dict(named(learner_of("llama", world, device)))
    for one in other.values():
        local(one.data).zero_()
    with TemporaryDirectory() as folder:
        (Path(folder) / "state").mkdir()
        part = Contents(model={}, shards=copy_shards(parameters, world.everyone))
        (file,) = part.write_part(Path(folder))
        fill({name: one.data for name, one in other.items()}, [Path(folder) / file.name])
    return max(float((whole(p) - whole(other[name])).abs().max()) for name, p in parameters.items())


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    supply_missing()
    world = world_of(device)
    found = {"checkpoint": checkpoint_error(world, device)}
    for one in FAMILIES:
        found[f"fp32 {one}"] = step_error(one, world, device)
        found[f"bf16 {one}"] = narrow_error(one, world, device)
        print(json.dumps(found), flush=True)  # each kernel is compiled first: this takes a while
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
