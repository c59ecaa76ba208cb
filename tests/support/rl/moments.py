"""Moments of 8 bits on ranks against those of one process: `torchrun --nproc-per-node N MODULE`.

Prints, on rank 0, one JSON object, for each mesh of `tests.support.rl.meshes`: "<mesh> <case>":
the largest relative difference of the weights, and "<mesh> narrow": the share of the weights whose
moments have 8 bits. Both sides have the same gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from forge.rl.config import OptimizerConfig, OptimizerName
from forge.rl.optimizers import Optimizers
from forge.rl.parallel.sharding import Entry, as_sharded, shard
from forge.rl.parallel.world import World, whole
from tests.support.rl.meshes import print_cases

MESHES = {2: ["1x2x1", "1x1x1x2"], 4: ["2x2x1", "1x2x1x2"]}
RATE = 1e-2
SPLIT = "down_proj"
"""Rows of 300 elements: blocks of several rows."""


class Trained:
    """A model with three kinds of rows, and its optimizer."""

    def __init__(self, world: World | None = None, name: OptimizerName = "adamw_8bit") -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=512,
            intermediate_size=300,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=20,
        )
        self.model: Any = LlamaForCausalLM(config)
        if world is not None:
            shard(Entry(self.model), world)
        self.optimizers = Optimizers(self.model, OptimizerConfig(name=name))

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = as_sharded(gradient, parameter)
        self.optimizers.step(RATE)

    def weights(self) -> dict[str, Tensor]:
        return {name: whole(one.detach()) for name, one in self.model.named_parameters()}

    def state(self) -> dict[str, Any]:
        """The optimizer's, whole on every rank."""
        state = self.optimizers.state_dict()
        parts = [
            {
                **part,
                "state": {
                    at: {key: _whole(one) for key, one in values.items()}
                    for at, values in part["state"].items()
                },
            }
            for part in state["parts"]
        ]
        return {**state, "parts": parts}

    def continue_from(self, other: Trained) -> None:
        state, weights = other.state(), other.weights()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(as_sharded(weights[name], parameter))
        self.optimizers.load_state_dict(state)

    def narrow(self) -> float:
        values = [
            (parameter.numel(), state["state1"].dtype == torch.uint8)
            for part in self.optimizers._parts
            for parameter, state in part.state.items()
        ]
        return sum(size for size, narrow in values if narrow) / sum(size for size, _ in values)


def _whole(value: Any) -> Any:
    return (
        whole(value)
        if isinstance(value, DTensor)
        else value.clone()
        if torch.is_tensor(value)
        else value
    )


def difference(one: Trained, other: Trained, *, split: bool | None = None) -> float:
    """Over all weights, or over those whose blocks ranks would split, or over the others."""
    mine, theirs = one.weights(), other.weights()
    names = [name for name in mine if split is None or (SPLIT in name) == split]
    return max(float((mine[name] - theirs[name]).norm() / theirs[name].norm()) for name in names)


def run_moments(mesh: str, world: World) -> dict[str, float]:
    """All cases of one mesh; all ranks call it."""
    ranks, alone, plain = Trained(world), Trained(), Trained(name="adamw")
    for seed in range(3):
        for one in (ranks, alone, plain):
            one.step(seed)
    found = {
        "whole blocks": difference(ranks, alone, split=False),
        "split blocks": difference(ranks, plain, split=True),
        "narrow": ranks.narrow(),
    }
    # From the mesh to one process, and back.
    one, again = Trained(), Trained(world)
    one.continue_from(ranks)
    again.continue_from(alone)
    ranks.step(3)
    one.step(3)
    found["continued alone"] = difference(one, ranks)
    again.step(3)
    alone.step(3)
    found["continued on ranks"] = difference(again, alone)
    return {f"{mesh} {case}": value for case, value in found.items()}


if __name__ == "__main__":
    print_cases(MESHES, run_moments)
