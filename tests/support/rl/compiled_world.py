"""Compiled layers on ranks that shard a model: `torchrun --nproc-per-node N MODULE`.

Prints, on rank 0, one JSON object: "<type in which layers are gathered>": the largest relative
difference of loss and gradients to those of one process with compiled layers. The check before
training passes first.
"""

from __future__ import annotations

import torch

from forge.rl.config import LearnerConfig
from forge.rl.learner.learner import Learner
from forge.rl.model.compiled import compile_layers
from forge.rl.model.policy import TreePolicy
from forge.rl.model.probe import check_policy
from forge.rl.parallel.world import World, whole
from tests.support.rl.meshes import print_cases
from tests.support.rl.models import Gradient, tiny_model
from tests.support.rl.worlds import CISPO, planned, samples

MESHES = {2: ["1x2x1"]}


def gradient(world: World | None, narrow: torch.dtype | None = None) -> Gradient:
    model = tiny_model("llama", torch.float32)
    policy = TreePolicy(model, autocast=torch.bfloat16)
    if world is not None:
        policy.spread(world, narrow=narrow)
    compile_layers(model)
    check_policy(policy)
    assert not policy.unmerged
    learner = Learner(policy, LearnerConfig(token_budget=40, objective=CISPO))
    loss, _ = learner.accumulate(planned(learner, samples()))
    named = model.named_parameters()
    return Gradient(loss=loss, of={name: whole(one.grad) for name, one in named})


def run_compiled(mesh: str, world: World) -> dict[str, float]:
    """All ranks call it."""
    del mesh
    expected = gradient(None)
    return {
        str(narrow): error_of(gradient(world, narrow), expected)
        for narrow in (None, torch.bfloat16)
    }


def error_of(actual: Gradient, expected: Gradient) -> float:
    """The largest of loss and gradients, relative to their own size."""
    return max(
        abs(actual.loss / expected.loss - 1),
        *(float((actual.of[name] - one).norm() / one.norm()) for name, one in expected.of.items()),
    )


if __name__ == "__main__":
    print_cases(MESHES, run_compiled)
