"""Optimizers by name, and the parameters that each steps.

Owns the parameter groups; `forge.rl.learner.learner` owns learning rates and steps.

    adamw       AdamW in fp32, fused
    adamw_8bit  the same with its two moments in 8 bits (bitsandbytes, an optional package)
    muon        Muon on the matrices of the backbone, AdamW on the other parameters
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge.core.errors import ConfigError, InvalidArgument
from forge.rl.config import OptimizerConfig
from forge.rl.out_of_memory import memory_shortage
from forge.rl.parallel.sharding import as_sharded
from forge.rl.parallel.state_memory import placed


class Optimizers:
    """One or two torch optimizers over disjoint parameters, stepped as one."""

    def __init__(
        self,
        model: Any,
        config: OptimizerConfig,
        *,
        extra: Sequence[Tensor] = (),
        extra_rate_scale: float = 1.0,
    ) -> None:
        """Steps the parameters of a transformers model that require a gradient, and `extra`
        parameters by AdamW at a scaled rate.

        Raises `InvalidArgument` when the optimizer's package is missing, and for sharded parameters
        with muon.
        """
        self.name = config.name
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        if config.name == "muon" and any(isinstance(p, DTensor) for p in self.parameters):
            raise InvalidArgument(
                "optimizer.name = 'muon' is not allowed with sharded parameters, since it steps "
                "whole matrices: use 'adamw' or 'adamw_8bit'"
            )
        matrices = _backbone_matrices(model) if config.name == "muon" else []
        taken = {id(parameter) for parameter in matrices}
        others = [p for p in self.parameters if id(p) not in taken]
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            # Updates of AdamW's size, so that one learning rate serves both.
            self._parts.append(
                torch.optim.Muon(
                    matrices,
                    momentum=config.muon_momentum,
                    weight_decay=config.weight_decay,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        if others:
            self._parts.append(_adamw(others, config))
        if extra:
            own = torch.optim.AdamW([*extra], betas=config.betas, weight_decay=0.0, fused=True)
            own.param_groups[0]["rate_scale"] = extra_rate_scale
            self._parts.append(own)
            self.parameters += extra

    def step(self, rate: float) -> None:
        """Update every parameter at this learning rate.

        Raises `ConfigError` when the first step has no memory for the optimizer's state: smaller
        batches would not help.
        """
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate * group.get("rate_scale", 1.0)
            first = not part.state
            try:
                part.step()
            except (RuntimeError, MemoryError) as error:
                shortage = memory_shortage(error)
                if not (first and shortage):
                    raise
                raise ConfigError(
                    f"optimizer.name = {self.name!r}: there is no memory for its state beside "
                    f"weights and gradients ({shortage}): use 'adamw_8bit', LoRA or a smaller "
                    "model"
                ) from error

    def zero_grad(self) -> None:
        """Free all gradients."""
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """The state for `load_state_dict`."""
        return {"name": self.name, "parts": [part.state_dict() for part in self._parts]}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises `InvalidArgument` for the state of another optimizer or of other weights."""
        name, parts = state.get("name"), state.get("parts", ())
        sizes, own = _sizes(parts), _sizes([part.state_dict() for part in self._parts])
        if name == self.name and sizes == own:
            return
        what = f"optimizer {name!r}"
        if name == self.name:
            what += f" over parameter groups of {sizes} tensors, which are {own} in this run"
        raise InvalidArgument(
            f"optimizer.name = {self.name!r} cannot continue from a checkpoint of {what}"
        )

    def placed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state whose tensors without data (on the meta device) are empty ones on the devices of
        this run, divided like their parameters. Raises `InvalidArgument` like `check_state`."""
        self.check_state(state)
        parts = []
        for part, own in zip(self._parts, state["parts"], strict=True):
            parameters = _parameters(part)
            moments = {
                at: {
                    name: placed(one, _like(part, name, parameters[at]))
                    for name, one in values.items()
                }
                for at, values in own["state"].items()
            }
            parts.append({**own, "state": moments})
        return {**state, "parts": parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises `InvalidArgument` for the state of another optimizer."""
        self.check_state(state)
        for part, own in zip(self._parts, state["parts"], strict=True):
            load_moments(part, own)


def load_moments(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load moments, whole or divided, from a `state_dict()`; the constants stay those of this
    run."""
    constants = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    parameters = _parameters(optimizer)
    moments = {
        index: {name: _divided(value, parameters[index]) for name, value in own.items()}
        for index, own in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": moments})
    for group, own in zip(optimizer.param_groups, constants, strict=True):
        group.update(own)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _divided(value: Any, parameter: Tensor) -> Any:
    """A moment, divided like its parameter."""
    same = isinstance(value, Tensor) and value.shape == parameter.shape
    return as_sharded(value, parameter) if same else value


def _sizes(parts: Iterable[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for part in parts for group in part["param_groups"]]


def _backbone_matrices(model: Any) -> list[Tensor]:
    """The parameters for Muon: maps between hidden states. Not embeddings, the head, and tables
    without a product of their own (`A_log` of Mamba, stacked experts)."""
    tables = {
        id(module.weight)
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if module is not None
    }
    layers = (one for one in model.modules() if not isinstance(one, nn.Embedding))
    weights = (one._parameters.get("weight") for one in layers)
    found = {id(one): one for one in weights if one is not None and one.ndim == 2}
    return [one for key, one in found.items() if one.requires_grad and key not in tables]


def _adamw(parameters: Iterable[Tensor], config: OptimizerConfig) -> torch.optim.Optimizer:
    both = list(parameters)
    decayed = [parameter for parameter in both if parameter.ndim >= 2]
    plain = [parameter for parameter in both if parameter.ndim < 2]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decayed, config.weight_decay), (plain, 0.0))
        if params
    ]
    if config.name != "adamw_8bit":
        return torch.optim.AdamW(groups, betas=config.betas, fused=True)
    try:
        from forge.rl.adamw_8bit import AdamW8bit
    except ImportError as error:
        raise InvalidArgument(
            "optimizer.name = 'adamw_8bit' needs the package bitsandbytes: "
            "pip install 'forge-rl[adamw8bit]'"
        ) from error
    optimizer: torch.optim.Optimizer = AdamW8bit(groups, betas=config.betas)
    return optimizer


def _like(part: torch.optim.Optimizer, name: str, parameter: Tensor) -> Tensor:
    """A tensor that is divided like a value of a parameter's state."""
    return part.like(name, parameter) if hasattr(part, "like") else parameter
