"""One shape of keys and values for attention layers of any numbers and shapes.

The memory of the engine has layers 0, 1, ..., all with the same number and size of heads. A model's
attention layers may have gaps in their numbers, share a number, or differ in their heads. They get
new numbers in the order of a pass; a layer with fewer heads repeats them, and shorter vectors end
with zeros, which costs memory and changes no result. Example: layers with 2 heads of 64 and 4 heads
of 128 become layers of 4 heads of 128; the first stores each head twice, with 64 zeros.

Shape suffixes as in kv/attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from forge.core.errors import InvalidArgument
from services.inference.engines.embedded.kv.attention import Heads, KvPass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The common shape."""

    layers: int
    heads: int
    head_size: int
    groups: int
    """Query heads of a key-value head, of the last layer."""
    is_plain: bool
    """True if every attention layer has this shape, and its number is its place in a pass."""


class FittedPass:
    """A `KvPass` over another one, for one forward pass."""

    def __init__(self, kv_pass: KvPass, fit: Fit) -> None:
        self._pass = kv_pass
        self._fit = fit
        self._layer = 0

    def attend(self, heads: Heads) -> torch.Tensor:
        """See `KvPass`."""
        size = heads.v_NHD.shape[2]
        repeats = self._fit.heads // heads.k_NHD.shape[1]
        missing = self._fit.head_size - size
        q_NQD, k_NHD, v_NHD = heads.q_NQD, heads.k_NHD, heads.v_NHD
        if repeats > 1:
            k_NHD, v_NHD = (one.repeat_interleave(repeats, dim=1) for one in (k_NHD, v_NHD))
        if missing:
            q_NQD, k_NHD, v_NHD = (pad(one, (0, missing)) for one in (q_NQD, k_NHD, v_NHD))
        fitted = heads._replace(layer=self._layer, q_NQD=q_NQD, k_NHD=k_NHD, v_NHD=v_NHD)
        self._layer += 1
        return self._pass.attend(fitted)[..., :size]


class Recorder:
    """A `KvPass` that notes shapes."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, int, int, int]] = []
        self.windowed = False

    def attend(self, heads: Heads) -> torch.Tensor:
        """Return zeros."""
        self.windowed |= any(
            one is not None for one in (heads.window, heads.softcap, heads.sinks_Q)
        )
        kv_heads, head_size = heads.k_NHD.shape[1:]
        groups = heads.q_NQD.shape[1] // kv_heads
        self._seen.append((heads.layer, kv_heads, head_size, groups))
        return heads.v_NHD.new_zeros((*heads.q_NQD.shape[:2], heads.v_NHD.shape[2]))

    def fit(self) -> Fit | None:
        """The common shape of the layers of one pass; None without attention. Raises
        InvalidArgument for heads that have none."""
        if not self._seen:
            return None
        heads = max(one for _, one, _, _ in self._seen)
        size = max(one for _, _, one, _ in self._seen)
        for layer, own, _, groups in self._seen:
            if heads % own or groups % (heads // own):
                raise InvalidArgument(
                    f"the embedded engine cannot store {own} key-value heads of {groups} query "
                    f"heads each, of layer {layer}, as {heads}"
                )
        plain = [(layer, heads, size) for layer in range(len(self._seen))]
        return Fit(
            layers=len(self._seen),
            heads=heads,
            head_size=size,
            groups=self._seen[-1][3] // (heads // self._seen[-1][1]),
            is_plain=[one[:3] for one in self._seen] == plain,
        )
