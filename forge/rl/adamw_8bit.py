"""AdamW with moments of 8 bits (bitsandbytes, an optional package), also of divided parameters.

Owns the division of these moments. bitsandbytes has one scale for each block of 256 elements, in
the order of memory. Where the rows of every part of a parameter are whole blocks, the parts' blocks
are those of the whole parameter. Then a step equals that of one process bit for bit, and a
checkpoint continues on any mesh. A divided parameter with other rows has moments of 32 bits.

Codes of a divided parameter are uint8 of its shape, [..., C]; scales are float32, [..., C / 256].
Both are divided like it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from bitsandbytes import optim
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge.rl.parallel.sharding import as_sharded, local
from forge.rl.parallel.world import whole

BLOCK = 256
SMALLEST = 4096
"""Parameters of fewer elements have moments of 32 bits, as in bitsandbytes."""
MOMENTS = {"state1": ("absmax1", "qmap1"), "state2": ("absmax2", "qmap2")}
"""Names of the two moments, of their scales and of their tables of values, in bitsandbytes."""
_TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}


class AdamW8bit(optim.AdamW8bit):  # type: ignore[misc]
    """The optimizer of bitsandbytes; of a divided parameter each rank steps its part."""

    def init_state(self, group: Any, p: Any, gindex: int, pindex: int) -> None:
        """Zeros before the first step of a parameter."""
        if not isinstance(p, DTensor):
            super().init_state(group, p, gindex, pindex)
            return
        narrow = has_whole_blocks(p)
        kind = torch.uint8 if narrow else torch.float32
        state = self.state[p]
        state["step"] = 0
        for moment, (scales, table) in MOMENTS.items():
            state[moment] = torch.zeros_like(p, dtype=kind, requires_grad=False)
            if narrow:
                state[scales] = scales_like(p)
                state[table] = self.name2qmap[_TABLES[table]].to(p.device)

    def update_step(self, group: Any, p: Any, gindex: int, pindex: int) -> None:
        """Step a parameter."""
        if not isinstance(p, DTensor):
            super().update_step(group, p, gindex, pindex)
            return
        state, part = self.state[p], nn.Parameter(local(p.detach()))
        if part.numel():
            assert p.grad is not None, "checked by `step`"
            part.grad = local(p.grad)
            self.state[part] = {name: _part_of(name, value) for name, value in state.items()}
            try:
                super().update_step(group, part, gindex, pindex)
            finally:
                del self.state[part]
        state["step"] += 1

    def state_dict(self) -> dict[str, Any]:
        """The state, with all values of a parameter in one dict."""
        state: dict[str, Any] = super().state_dict()
        return {**state, "state": {at: self._flat(one) for at, one in state["state"].items()}}

    def load_state_dict(self, state_dict: Any, move_to_device: bool = True) -> None:
        """Load the state of any mesh. Every rank calls it; moments of 8 bits whose blocks the parts
        of this mesh would split become those of 32 bits."""
        parameters = [one for group in self.param_groups for one in group["params"]]
        states = {
            at: _on_mesh(self._flat(state), parameters[at])
            for at, state in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": states}, move_to_device)

    def _flat(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """bitsandbytes has its own values of a parameter in a dict under one key."""
        key = self._FSDP_WRAPPED_QUANT_STATE_KEY
        own: dict[str, Any] = state.get(key, {})
        return {name: one for name, one in state.items() if name != key} | own

    def like(self, name: str, parameter: Tensor) -> Tensor:
        """A tensor with the shape and division of a value of a parameter's state."""
        if not (name.startswith("absmax") and isinstance(parameter, DTensor)):
            return parameter
        return scales_like(parameter) if has_whole_blocks(parameter) else parameter


def has_whole_blocks(parameter: DTensor) -> bool:
    """Whether no block of the scales is on two ranks."""
    if parameter.numel() < SMALLEST:
        return False
    last = parameter.ndim - 1
    mesh, placements = parameter.device_mesh, parameter.placements
    divisors = [
        mesh.size(axis)
        for axis, placement in enumerate(placements)
        if getattr(placement, "dim", None) == last
    ]
    whole_rows: bool = parameter.shape[-1] % (BLOCK * math.prod(divisors)) == 0
    return whole_rows and local(parameter).is_contiguous()


def scales_like(parameter: DTensor) -> DTensor:
    """Zeros for the scales of a parameter with whole blocks."""
    part = local(parameter)
    *rows, columns = parameter.shape
    shape = torch.Size((*rows, columns // BLOCK))
    return DTensor.from_local(
        part.new_zeros((*part.shape[:-1], part.shape[-1] // BLOCK), dtype=torch.float32),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def _part_of(name: str, value: Any) -> Any:
    """This rank's part of a value of the state; it shares its memory."""
    if not isinstance(value, DTensor):
        return value
    return local(value).view(-1) if name.startswith("absmax") else local(value)


def _on_mesh(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """The state of a parameter from any mesh, divided as this one divides it."""
    found = dict(state)
    if not isinstance(parameter, DTensor):
        flat = {name: one.flatten() for name, one in state.items() if name.startswith("absmax")}
        return found | flat
    for moment, (scales, table) in MOMENTS.items():
        if scales in state and has_whole_blocks(parameter):
            rows = state[scales].reshape(*parameter.shape[:-1], -1)
            found[scales] = as_sharded(rows, scales_like(parameter)).contiguous()
        elif scales in state:
            del found[scales], found[table]
            found[moment] = _widened(state, moment, scales, table)
        # Steps change parts in place.
        found[moment] = as_sharded(found[moment], parameter).contiguous()
    return found


def _widened(state: Mapping[str, Any], moment: str, scales: str, table: str) -> Tensor:
    """A whole moment in float32, from its codes."""
    codes = whole(state[moment])
    values: Tensor = state[table].to(codes.device)[codes.flatten().int()]
    each = whole(state[scales]).flatten().repeat_interleave(BLOCK)[: codes.numel()]
    return (values * each).view(codes.shape)
