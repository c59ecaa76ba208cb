"""Errors of ranks that divide layers: `torchrun --nproc-per-node N MODULE`, with this module.

Prints, on rank 0, one JSON object like `tests.support.rl.worlds`, whose cases it computes on meshes
with `tp`: "<dp_replicate>x<dp_shard>x<cp>x<tp> <case>". With arguments only the meshes that they
name.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from forge.core.errors import InvalidArgument
from forge.rl.config import LearnerConfig
from forge.rl.parallel.world import World
from tests.support.rl import worlds
from tests.support.rl.meshes import print_cases, write_cases
from tests.support.rl.models import wide_norms
from tests.support.rl.worlds import STEPS, Case, gradient_error, policy_of
from tests.support.trainer.memory import measured_bytes

MESHES = {
    2: ["1x1x1x2"],
    4: ["1x2x1x2", "1x1x2x2", "2x1x1x2"],
}
PARTS = 2
CASES = {
    **{
        name: worlds.CASES[name]
        for name in ("untied", "tied", "windows", "experts", "replayed experts", "relayed")
    },
    "relayed experts": worlds.CASES["relayed experts"],
    "checkpointed, relayed": worlds.CASES["checkpointed, relayed"],
    "other experts": Case(family="mixtral"),
    "capped logits": Case(family="gemma2"),
    "latent keys": Case(family="glm4_moe_lite"),
    "joined products": Case(family="phi3"),
    "adapters": worlds.CASES["adapters"],
    "adapters, relayed experts": worlds.CASES["adapters, relayed experts"],
    "adapters, latent keys": Case(family="glm4_moe_lite", adapters=("all-linear",)),
    "adapters, joined products": Case(family="phi3", adapters=("all-linear",)),
    "whole attention": Case(family="gpt_oss"),
    "whole attention, divided experts": Case(family="deepseek_v3"),
}
LEAN = ("tied", "relayed experts", "adapters")
REFUSED = {
    "recurrent": ("recurrent", "recurrent"),
    "linear attention": ("linear attention", "recurrent"),
}
"""Cases of `worlds`, and what the refusal says."""
FEW_HEADS = ("untied", "num_key_value_heads = 2 is not a multiple of it; use mesh.tp = 2")
"""The same for four parts."""


def refusal_error(name: str, reason: str, world: World) -> float:
    """0 where the model is refused with the reason."""
    try:
        policy_of(worlds.CASES[name], world)
    except InvalidArgument as error:
        said = str(error)
        return 0.0 if reason in said and f"mesh.tp = {world.shape.tp}" in said else 1.0
    return 1.0


def all_cases(mesh: str, world: World, *, lean: bool) -> dict[str, float]:
    found: dict[str, float] = {}
    with wide_norms():
        for name, case in CASES.items():
            if name in LEAN or not lean:
                found[f"{mesh} fp64 {name}"] = gradient_error(case, world)
        if not lean:
            found[f"{mesh} fp64 steps with adapters"] = worlds.adapted_steps_error(world)
            for name, config in STEPS.items():
                if not config.mtp.heads:
                    error = worlds.step_error(config, world, dtype=torch.float64)
                    found[f"{mesh} steps, {name}"] = error
            found[f"{mesh} fp16 token values"] = worlds.token_values_error(world)
    found[f"{mesh} held"] = worlds.held(world, CASES["untied"])
    found[f"{mesh} held of experts"] = worlds.held(world, CASES["experts"])
    if lean:
        return found
    found[f"{mesh} fp32 step, served"] = worlds.step_error(LearnerConfig(), world, served=True)
    if world.tree is None:  # ranges of a tree round attention differently
        found[f"{mesh} bf16 step, gathered in bf16"] = worlds.narrow_error(world)
    found[f"{mesh} fp32 refused optimizer"] = worlds.refusal_error(world)
    for refused, (name, reason) in REFUSED.items():
        found[f"{mesh} fp32 refused {refused}"] = refusal_error(name, reason, world)
    found[f"{mesh} fp32 probe"] = worlds.probe_error(world)
    for kind, recompute in {"kept": False, "recomputed": True}.items():
        found[f"{mesh} bytes, {kind}"] = measured_bytes(world, recompute=recompute)
    return found


def cases_of_four(mesh: str, world: World) -> dict[str, float]:
    """The cases of four parts: models with a key-value head for each, and one with too few."""
    found = {}
    with wide_norms():
        for name, case in CASES.items():
            of_four = replace(case, kv_heads=world.shape.tp)
            found[f"{mesh} fp64 {name}"] = gradient_error(of_four, world)
    found[f"{mesh} fp64 refused few heads"] = refusal_error(*FEW_HEADS, world)
    found[f"{mesh} held"] = worlds.held(world, replace(CASES["untied"], kv_heads=world.shape.tp))
    return found


def all_or_four(mesh: str, world: World) -> dict[str, float]:
    """The cases of a mesh."""
    if world.shape.tp == PARTS:
        return all_cases(mesh, world, lean=False)
    return cases_of_four(mesh, world)


def run_part(rank: int, meeting: str, results: str) -> None:
    """One of two ranks with a part of each layer; rank 0 writes the errors of some cases."""
    lean = partial(all_cases, lean=True)
    write_cases(f"1x1x1x{PARTS}", lean, rank=rank, meeting=meeting, results=results)


if __name__ == "__main__":
    print_cases(MESHES, all_or_four)
