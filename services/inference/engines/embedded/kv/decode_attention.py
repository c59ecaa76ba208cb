"""One decode step's attention: a new token for every running sequence.

Each sequence reads its own slab row. All sequences of a trunk read it together, and the two results
are merged by their log-sum-exp.

Shape suffixes: N sequences, R rows of a slab, K sequences of one trunk, M sequences that read
trunks, H key-value heads, G query heads per key-value head, Q = H * G, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from services.inference.engines.embedded.kv.attention import (
    Heads,
    attention,
    attention_bias,
)
from services.inference.engines.embedded.kv.shared_prefixes import Trunk
from services.inference.engines.embedded.kv.slabs import ALIGNMENT_TOKENS, Slab

_PADDED_SEQUENCES = 16
"""A trunk with more sequences is read alone; the others are padded to the largest of them."""


class SlabStep:
    """The KvPass of one step: token i of the pass is of the i-th sequence of the slabs."""

    def __init__(self, slabs: Sequence[Slab], trunk_slabs: Sequence[Slab]) -> None:
        device = slabs[0].layers[0].device
        self._dtype = slabs[0].layers[0].dtype
        self._slabs = slabs
        self._rows_R = [torch.arange(len(slab.rows), device=device) for slab in slabs]
        self._own_R = [
            torch.tensor([row.tokens for row in slab.rows], device=device) for slab in slabs
        ]
        self._lengths = [_length(slab, [row.tokens + 1 for row in slab.rows]) for slab in slabs]
        rows = [row for slab in slabs for row in slab.rows]
        self.positions_N = torch.tensor([row.base + row.tokens for row in rows], device=device)
        numbers = {id(row): number for number, row in enumerate(rows)}
        self._reads = [
            _TrunkRead.of(slab, trunks, numbers) for slab in trunk_slabs for trunks in _reads(slab)
        ]
        self._bias: dict[int | None, list[torch.Tensor]] = {}

    def attend(self, heads: Heads) -> torch.Tensor:
        """Store the new keys and values, then attend; see `KvPass`."""
        layer, q_NQD, k_NHD, v_NHD, scale, window, _ = heads
        q_NHGD = q_NQD.view(len(q_NQD), k_NHD.shape[1], -1, k_NHD.shape[2])
        bias = self._bias_for(window)
        out, lse = [], []
        start = 0
        for index, slab in enumerate(self._slabs):
            end = start + len(slab.rows)
            k_RHTD, v_RHTD = slab.layers[layer]
            k_RHTD[self._rows_R[index], :, self._own_R[index]] = k_NHD[start:end]
            v_RHTD[self._rows_R[index], :, self._own_R[index]] = v_NHD[start:end]
            seen = slice(0, self._lengths[index])
            own = (
                q_NHGD[start:end],
                k_RHTD[: end - start, :, seen],
                v_RHTD[: end - start, :, seen],
            )
            if self._reads:
                read, read_lse = _attention_with_lse(*own, bias=bias[index], scale=scale)
                lse.append(read_lse)
            else:
                read = attention(*own, bias=bias[index], heads=heads)
            out.append(read)
            start = end
        out_NHGD = torch.cat(out) if len(out) > 1 else out[0]
        if self._reads:
            self._merge_trunks(layer, q_NHGD, out_NHGD, torch.cat(lse), scale=scale)
        return out_NHGD.flatten(1, 2)

    def _merge_trunks(
        self,
        layer: int,
        q_NHGD: torch.Tensor,
        out_NHGD: torch.Tensor,
        lse_NHG: torch.Tensor,
        *,
        scale: float | None,
    ) -> None:
        for read in self._reads:
            trunk_out, trunk_lse = read.attend(layer, q_NHGD, scale=scale)
            asking = read.asking
            # softmax over both parts, from the two parts' log-sum-exp.
            share = torch.sigmoid(trunk_lse - lse_NHG[asking])[..., None]
            own = out_NHGD[asking].to(share.dtype)
            out_NHGD[asking] = torch.lerp(own, trunk_out.to(share.dtype), share).to(self._dtype)

    def _bias_for(self, window: int | None) -> list[torch.Tensor]:
        if window not in self._bias:
            self._bias[window] = [
                _bias(own_R, length, window=window, dtype=self._dtype)
                for own_R, length in zip(self._own_R, self._lengths, strict=True)
            ]
        return self._bias[window]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrunkRead:
    """Trunks of one slab that all their sequences read in one call."""

    slab: Slab
    rows: slice
    length: int
    bias: torch.Tensor | None
    """[R, 1, 1, T]; None when all trunks have the same length."""
    table: torch.Tensor
    """[R, K], the number of the sequence that reads there; padding beyond a trunk's own."""
    asking: torch.Tensor
    """[M], the numbers of the reading sequences, each once."""
    places: torch.Tensor
    """[M], the place of each in the flattened table."""

    @classmethod
    def of(cls, slab: Slab, trunks: Sequence[Trunk], numbers: Mapping[int, int]) -> _TrunkRead:
        """`numbers`: the number of each sequence by its id()."""
        kv = slab.layers[0]
        widest = max(len(trunk.sequences) for trunk in trunks)
        table: list[list[int]] = []
        asking: list[int] = []
        places: list[int] = []
        for row, trunk in enumerate(trunks):
            own = [numbers[id(sequence)] for sequence in trunk.sequences]
            table.append(own + [0] * (widest - len(own)))
            asking += own
            places += range(row * widest, row * widest + len(own))
        lengths = [trunk.tokens for trunk in trunks]
        longest = _length(slab, lengths)
        bias = None
        if set(lengths) != {longest}:
            last_R = torch.tensor(lengths, device=kv.device) - 1
            bias = _bias(last_R, longest, window=None, dtype=kv.dtype)
        return cls(
            slab=slab,
            rows=slice(trunks[0].row, trunks[-1].row + 1),
            length=longest,
            bias=bias,
            table=torch.tensor(table, device=kv.device),
            asking=torch.tensor(asking, device=kv.device),
            places=torch.tensor(places, device=kv.device),
        )

    def attend(
        self, layer: int, q_NHGD: torch.Tensor, *, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the asking sequences read, [M, H, G, D], and its log-sum-exp, [M, H, G]."""
        k_RHTD, v_RHTD = self.slab.layers[layer][:, self.rows, :, : self.length]
        q_RKHGD = q_NHGD[self.table]
        rows, asking, heads, groups, head_size = q_RKHGD.shape
        q_RHKD = q_RKHGD.transpose(1, 2).reshape(rows, heads, asking * groups, head_size)
        out, lse = _attention_with_lse(q_RHKD, k_RHTD, v_RHTD, bias=self.bias, scale=scale)
        out = out.view(rows, heads, asking, groups, head_size).transpose(1, 2)
        lse = lse.view(rows, heads, asking, groups).transpose(1, 2)
        return out.flatten(0, 1)[self.places], lse.flatten(0, 1)[self.places]


def _reads(slab: Slab) -> list[list[Trunk]]:
    """The trunks of a slab, in consecutive runs that are read in one call each."""
    runs: list[list[Trunk]] = []
    for trunk in slab.rows:
        assert isinstance(trunk, Trunk)
        if runs and not _is_wide(trunk) and not _is_wide(runs[-1][-1]):
            runs[-1].append(trunk)
        else:
            runs.append([trunk])
    return runs


def _is_wide(trunk: Trunk) -> bool:
    return len(trunk.sequences) > _PADDED_SEQUENCES


def _attention_with_lse(
    q_BHGD: torch.Tensor,
    k_BHTD: torch.Tensor,
    v_BHTD: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the float32 log-sum-exp of its scores, [B, H, G]; trunks are for CPUs."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_BHGD, k_BHTD, v_BHTD, 0.0, False, attn_mask=bias, scale=scale
    )
    return out, lse


def _length(slab: Slab, needed: Sequence[int]) -> int:
    """How much of a slab to look at."""
    longest = -(-max(needed) // ALIGNMENT_TOKENS) * ALIGNMENT_TOKENS
    return min(slab.class_tokens, longest)


def _bias(
    positions_R: torch.Tensor, length: int, *, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """The bias of rows with one query each: [R, 1, 1, length]."""
    return attention_bias(positions_R, length, window=window, dtype=dtype)[:, None, None]
