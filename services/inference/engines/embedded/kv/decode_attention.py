"""One decode step's attention: a new token for every running sequence, and its drafts.

Each sequence reads its own slab row. All sequences of a shared prefix read it together, and the two
results are merged by their log-sum-exp.

Shape suffixes: N new tokens, R rows of a slab, S new tokens of each row, padded to the most of a
row, K tokens that read one shared prefix, M tokens that read shared prefixes, H key-value heads,
G query heads per key-value head, Q = H * G, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from services.inference.engines.embedded.kv.attention import (
    Heads,
    attention,
    attention_bias,
    attention_with_lse,
    exact_type,
    with_sinks,
)
from services.inference.engines.embedded.kv.shared_prefixes import SharedPrefix
from services.inference.engines.embedded.kv.slabs import Slab, SlabRow, aligned

_PADDED_SEQUENCES = 16
"""A prefix with more sequences is read alone; the others are padded to the largest of them."""


class SlabStep:
    """The KvPass of one step: its tokens are those of the slabs' sequences, in order, each with as
    many as its `step_tokens`."""

    def __init__(
        self,
        slabs: Sequence[Slab],
        prefix_slabs: Sequence[Slab],
        *,
        part: Sequence[SlabRow] | None,
    ) -> None:
        """`part`: the sequences to compute, consecutive in that order; None: all."""
        device = slabs[0].layers[0].device
        self._dtype = exact_type(slabs[0].layers[0])
        computed = [(slab, _rows_in(slab, part)) for slab in slabs]
        self._slabs = [_SlabTokens.of(slab, rows) for slab, rows in computed if rows]
        positions: list[int] = []
        numbers: dict[int, range] = {}
        for row in (slab.rows[number] for slab, rows in computed for number in rows):
            numbers[id(row)] = range(len(positions), len(positions) + row.step_tokens)
            first = row.base + row.tokens
            positions += range(first, first + row.step_tokens)
        self.positions_N = torch.tensor(positions, device=device)
        self._reads = [
            _PrefixRead.of(slab, prefixes, numbers)
            for slab in prefix_slabs
            for prefixes in _reads(slab)
            if any(id(one) in numbers for shared in prefixes for one in shared.sequences)
        ]
        self._bias: dict[tuple[int | None, int], list[torch.Tensor]] = {}

    def attend(self, heads: Heads) -> torch.Tensor:
        """Store the new keys and values, then attend; see `KvPass`."""
        layer, q_NQD, k_NHD, v_NHD, scale, window, _, sinks_Q = heads
        q_NHGD = q_NQD.to(self._dtype).view(len(q_NQD), k_NHD.shape[1], -1, k_NHD.shape[2])
        bias = self._bias_for(window, q_NHGD.shape[2])
        out, lse = [], []
        start = 0
        for index, tokens in enumerate(self._slabs):
            new = slice(start, start + tokens.count)
            start = new.stop
            k_RHTD, v_RHTD = tokens.store(layer, k_NHD[new], v_NHD[new])
            own = (tokens.padded(q_NHGD[new]), k_RHTD, v_RHTD)
            if self._reads or sinks_Q is not None:
                read, read_lse = attention_with_lse(*own, bias=bias[index], scale=scale)
                lse.append(tokens.unpadded(read_lse[..., None])[..., 0])
            else:
                read = attention(*own, bias=bias[index], heads=heads)
            out.append(tokens.unpadded(read))
        out_NHGD = torch.cat(out) if len(out) > 1 else out[0]
        if self._reads:
            self._merge_prefixes(layer, q_NHGD, out_NHGD, torch.cat(lse), scale=scale)
        if sinks_Q is not None:
            sinks_HG = sinks_Q.view(q_NHGD.shape[1:3])
            out_NHGD = with_sinks(out_NHGD, torch.cat(lse), sinks_HG)
        return out_NHGD.flatten(1, 2).to(q_NQD.dtype)

    def _merge_prefixes(
        self,
        layer: int,
        q_NHGD: torch.Tensor,
        out_NHGD: torch.Tensor,
        lse_NHG: torch.Tensor,
        *,
        scale: float | None,
    ) -> None:
        for read in self._reads:
            prefix_out, prefix_lse = read.attend(layer, q_NHGD, scale=scale)
            asking = read.asking
            # softmax over both parts, from the two parts' log-sum-exp.
            share = torch.sigmoid(prefix_lse - lse_NHG[asking])[..., None]
            own = out_NHGD[asking].to(share.dtype)
            out_NHGD[asking] = torch.lerp(own, prefix_out.to(share.dtype), share).to(self._dtype)

    def _bias_for(self, window: int | None, groups: int) -> list[torch.Tensor]:
        if (window, groups) not in self._bias:
            self._bias[window, groups] = [
                tokens.bias(window=window, groups=groups, dtype=self._dtype)
                for tokens in self._slabs
            ]
        return self._bias[window, groups]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SlabTokens:
    """The new tokens of one slab's rows."""

    slab: Slab
    rows: range
    """Numbers of the rows."""
    count: int
    length: int
    """Tokens of the slab to look at."""
    rows_N: torch.Tensor
    """The row of each token, ..."""
    places_N: torch.Tensor
    """... and its place there."""
    widest: int
    """S."""
    table_RS: torch.Tensor | None
    """The number of each row's s-th token, its first one's beyond its own; None if all rows have S
    tokens."""
    numbers_N: torch.Tensor | None
    """The place of each token in the flattened table."""

    @classmethod
    def of(cls, slab: Slab, numbered: range) -> _SlabTokens:
        """The tokens of some rows of a slab, `numbered` so."""
        device = slab.layers[0].device
        own_rows = slab.rows[numbered.start : numbered.stop]
        rows: list[int] = []
        places: list[int] = []
        table: list[list[int]] = []
        numbers: list[int] = []
        widest = max(row.step_tokens for row in own_rows)
        for place, row in enumerate(own_rows):
            own = range(len(rows), len(rows) + row.step_tokens)
            table.append([*own, *[own.start] * (widest - len(own))])
            numbers += range(place * widest, place * widest + len(own))
            rows += [row.row] * len(own)
            places += range(row.tokens, row.tokens + len(own))
        ragged = len(rows) < widest * len(own_rows)
        return cls(
            slab=slab,
            rows=numbered,
            count=len(rows),
            length=_length(slab, [row.tokens + row.step_tokens for row in own_rows]),
            rows_N=torch.tensor(rows, device=device),
            places_N=torch.tensor(places, device=device),
            widest=widest,
            table_RS=torch.tensor(table, device=device) if ragged else None,
            numbers_N=torch.tensor(numbers, device=device) if ragged else None,
        )

    def store(
        self, layer: int, k_NHD: torch.Tensor, v_NHD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values; return those of the rows, [R, H, T, D] each."""
        k_RHTD, v_RHTD = self.slab.layers[layer]
        k_RHTD[self.rows_N, :, self.places_N] = k_NHD
        v_RHTD[self.rows_N, :, self.places_N] = v_NHD
        seen = (slice(self.rows.start, self.rows.stop), slice(None), slice(0, self.length))
        return k_RHTD[seen], v_RHTD[seen]

    def padded(self, q_NHGD: torch.Tensor) -> torch.Tensor:
        """By rows, [R, H, S * G, D]."""
        if self.widest == 1:
            return q_NHGD
        if self.table_RS is None:
            q_RSHGD = q_NHGD.view(-1, self.widest, *q_NHGD.shape[1:])
        else:
            q_RSHGD = q_NHGD[self.table_RS]
        return q_RSHGD.transpose(1, 2).flatten(2, 3)

    def unpadded(self, out_RHQX: torch.Tensor) -> torch.Tensor:
        """The inverse, [N, H, G, X]."""
        if self.widest == 1:
            return out_RHQX
        rows, heads, _, size = out_RHQX.shape
        out = out_RHQX.reshape(rows, heads, self.widest, -1, size).transpose(1, 2).flatten(0, 1)
        return out if self.numbers_N is None else out[self.numbers_N]

    def bias(self, *, window: int | None, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """[R, 1, S * G, T], or [R, 1, 1, T] for one token each."""
        places_RS = self.places_N
        if self.table_RS is not None:
            places_RS = places_RS[self.table_RS]
        bias = attention_bias(places_RS.flatten(), self.length, window=window, dtype=dtype)
        if self.widest == 1:
            return bias[:, None, None]
        by_row = bias.view(len(self.rows), 1, self.widest, 1, self.length)
        return by_row.expand(-1, -1, -1, groups, -1).flatten(2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PrefixRead:
    """Shared prefixes of one slab that all their sequences read in one call."""

    slab: Slab
    rows: slice
    length: int
    bias: torch.Tensor | None
    """[R, 1, 1, T]; None when all shared prefixes have the same length."""
    table: torch.Tensor
    """[R, K], the number of the token that reads there; padding beyond a shared prefix's own."""
    asking: torch.Tensor
    """[M], the numbers of the reading tokens, each once."""
    places: torch.Tensor
    """[M], the place of each in the flattened table."""

    @classmethod
    def of(
        cls, slab: Slab, prefixes: Sequence[SharedPrefix], numbers: Mapping[int, range]
    ) -> _PrefixRead:
        """`numbers`: those of each sequence's tokens, by its id()."""
        kv = slab.layers[0]
        reading = [
            [n for one in shared.sequences for n in numbers.get(id(one), ())] for shared in prefixes
        ]
        widest = max(map(len, reading))
        table: list[list[int]] = []
        asking: list[int] = []
        places: list[int] = []
        for row, own in enumerate(reading):
            table.append(own + [0] * (widest - len(own)))
            asking += own
            places += range(row * widest, row * widest + len(own))
        lengths = [shared.tokens for shared in prefixes]
        longest = _length(slab, lengths)
        bias = None
        if set(lengths) != {longest}:
            last_R = torch.tensor(lengths, device=kv.device) - 1
            kind = exact_type(kv)
            bias = attention_bias(last_R, longest, window=None, dtype=kind)[:, None, None]
        return cls(
            slab=slab,
            rows=slice(prefixes[0].row, prefixes[-1].row + 1),
            length=longest,
            bias=bias,
            table=torch.tensor(table, device=kv.device),
            asking=torch.tensor(asking, device=kv.device),
            places=torch.tensor(places, device=kv.device),
        )

    def attend(
        self, layer: int, q_NHGD: torch.Tensor, *, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the asking tokens, [M, H, G, D], and its log-sum-exp, [M, H, G]."""
        k_RHTD, v_RHTD = self.slab.layers[layer][:, self.rows, :, : self.length]
        q_RKHGD = q_NHGD[self.table]
        rows, asking, heads, groups, head_size = q_RKHGD.shape
        q_RHKD = q_RKHGD.transpose(1, 2).reshape(rows, heads, asking * groups, head_size)
        out, lse = attention_with_lse(q_RHKD, k_RHTD, v_RHTD, bias=self.bias, scale=scale)
        out = out.view(rows, heads, asking, groups, head_size).transpose(1, 2)
        lse = lse.view(rows, heads, asking, groups).transpose(1, 2)
        return out.flatten(0, 1)[self.places], lse.flatten(0, 1)[self.places]


def _rows_in(slab: Slab, part: Sequence[SlabRow] | None) -> range:
    """The numbers of the rows of a slab that belong to `part`."""
    if part is None:
        return range(len(slab.rows))
    own = [one.row for one in part if one.slab is slab]
    return range(own[0], own[-1] + 1) if own else range(0)


def _reads(slab: Slab) -> list[list[SharedPrefix]]:
    """The shared prefixes of a slab, in consecutive runs that are read in one call each."""
    runs: list[list[SharedPrefix]] = []
    for shared in slab.rows:
        assert isinstance(shared, SharedPrefix)
        if runs and not _is_wide(shared) and not _is_wide(runs[-1][-1]):
            runs[-1].append(shared)
        else:
            runs.append([shared])
    return runs


def _is_wide(shared: SharedPrefix) -> bool:
    return len(shared.sequences) > _PADDED_SEQUENCES


def _length(slab: Slab, needed: Sequence[int]) -> int:
    """Length of the part of a slab to attend to."""
    longest = aligned(max(needed))
    return min(slab.class_tokens, longest)
