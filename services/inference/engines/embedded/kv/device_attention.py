"""Choice of the kernels that attend over extents on this device, by comparison with torch.

Shape suffixes as in `extent_kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import accumulate
from typing import Protocol

import torch

from forge.core.errors import first_line
from forge.runtime.telemetry import log
from services.inference.engines.embedded.kv.attention import Heads, attention, attention_bias
from services.inference.engines.embedded.kv.shape import KvShape

_TOKENS = 192
_NARROW_TOLERANCE = 0.05
_TOLERANCE = 1e-3


class ExtentAttention(Protocol):
    """Attention of new tokens over the extents of their sequences."""

    def __call__(
        self,
        heads: Heads,
        k_HTD: torch.Tensor,
        v_HTD: torch.Tensor,
        *,
        starts_N: torch.Tensor,
        places_N: torch.Tensor,
    ) -> torch.Tensor:
        """Return [N, Q, D]: row n sees the tokens from `starts_N` to its own, `places_N` later."""


def device_attention(shape: KvShape) -> ExtentAttention | None:
    """The Triton kernels; None on a CPU, and, with a line in the log, where they are absent or
    wrong."""
    if shape.device.type == "cpu":
        return None
    try:
        kernels = import_module("services.inference.engines.embedded.kv.extent_kernels")
        found: ExtentAttention = kernels.attention_on(shape.device)
        error = _error(found, shape)
    except Exception as failure:
        log.warning("device_attention_not_used", reason=first_line(failure))
        return None
    tolerance = _TOLERANCE if shape.dtype.itemsize > 2 else _NARROW_TOLERANCE
    if not error <= tolerance:
        log.warning("device_attention_not_used", reason=f"its outputs differ by {error:.3g}")
        return None
    return found


class PackedAttention(Protocol):
    """Causal attention within each of several packed sequences."""

    def __call__(self, heads: Heads, ends: torch.Tensor, *, longest: int) -> torch.Tensor:
        """Return [N, Q, D]. `ends`: 0, then the number of tokens up to the end of each sequence,
        int32; `longest`: tokens of the longest one."""


def packed_attention(shape: KvShape) -> PackedAttention | None:
    """Torch's flash attention over sequences of any lengths; None on a CPU, in 32 bits, for models
    with windows, caps or sinks, and, with a line in the log, where it is absent or wrong."""
    if shape.device.type == "cpu" or shape.dtype.itemsize > 2 or shape.windowed:
        return None
    try:
        error = _packed_error(shape)
    except Exception as failure:
        log.warning("packed_attention_not_used", reason=first_line(failure))
        return None
    if not error <= _NARROW_TOLERANCE:
        log.warning("packed_attention_not_used", reason=f"its outputs differ by {error:.3g}")
        return None
    return _flash


def ends_of(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """The `ends` of a `PackedAttention`."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _flash(heads: Heads, ends: torch.Tensor, *, longest: int) -> torch.Tensor:
    """The `PackedAttention` of torch."""
    found: torch.Tensor = torch.ops.aten._flash_attention_forward(
        heads.q_NQD,
        heads.k_NHD,
        heads.v_NHD,
        ends,
        ends,
        longest,
        longest,
        0.0,
        True,
        False,
        scale=heads.scale,
    )[0]
    return found


@torch.inference_mode()
def _packed_error(shape: KvShape) -> float:
    """The largest difference to attention over each sequence alone."""
    random = torch.Generator().manual_seed(0)
    lengths = (3, 130, 61)

    def some(count: int) -> torch.Tensor:
        size = (count, sum(lengths), shape.head_size)
        return torch.randn(size, generator=random).to(shape.device, shape.dtype).transpose(0, 1)

    queries = shape.heads * shape.groups
    heads = Heads(0, some(queries), some(shape.heads), some(shape.heads), None, None)
    found_NQD = _flash(heads, ends_of(lengths, shape.device), longest=max(lengths))
    worst, start = 0.0, 0
    for length in lengths:
        rows = slice(start, start + length)
        start = rows.stop
        q_QSD, k_QSD, v_QSD = (
            one[rows].transpose(0, 1).repeat_interleave(queries // one.shape[1], 0)[None]
            for one in heads[1:4]
        )
        expected_QSD = attention(q_QSD, k_QSD, v_QSD, bias=None, heads=heads, is_causal=True)[0]
        error = (found_NQD[rows] - expected_QSD.transpose(0, 1)).abs().max()
        worst = max(worst, float(error))
    return worst


def plain_attention(
    heads: Heads,
    k_HTD: torch.Tensor,
    v_HTD: torch.Tensor,
    *,
    starts_N: torch.Tensor,
    places_N: torch.Tensor,
) -> torch.Tensor:
    """The `ExtentAttention` of torch, a token after the other: slow, for checks."""
    read = []
    kv_heads, _, size = k_HTD.shape
    for q_QD, start, place in zip(heads.q_NQD, starts_N.tolist(), places_N.tolist(), strict=True):
        q_HGSD = q_QD.view(kv_heads, -1, 1, size)
        groups = q_HGSD.shape[1]
        seen = slice(start, start + place + 1)
        last = torch.tensor([place], device=k_HTD.device)
        out_HGSD = attention(
            q_HGSD,
            k_HTD[:, None, seen].expand(-1, groups, -1, -1),
            v_HTD[:, None, seen].expand(-1, groups, -1, -1),
            bias=attention_bias(last, place + 1, window=heads.window, dtype=k_HTD.dtype),
            heads=heads,
            sinks=None if heads.sinks_Q is None else heads.sinks_Q.view(kv_heads, groups, 1),
        )
        read.append(out_HGSD.flatten(0, 1)[:, 0])
    return torch.stack(read)


@torch.inference_mode()
def _error(attend: ExtentAttention, shape: KvShape) -> float:
    """The largest difference to torch's own attention, on random numbers of size 1."""
    worst = 0.0
    queries = shape.heads * shape.groups
    random = torch.Generator().manual_seed(0)

    def some(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=random).to(shape.device, shape.dtype)

    k_HTD, v_HTD = some(2, shape.heads, _TOKENS, shape.head_size)
    for places in ([_TOKENS - 18], [3, 0, 90, 17, 70]):
        starts = [16, 0, 32, 100, 121][: len(places)]
        q_NQD = some(queries, len(places), shape.head_size).transpose(0, 1)
        for window, softcap, sinks_Q in _kinds(shape, some(queries)):
            heads = Heads(0, q_NQD, q_NQD, q_NQD, None, window, softcap, sinks_Q)
            found_NQD, expected_NQD = (
                each(
                    heads,
                    k_HTD,
                    v_HTD,
                    starts_N=torch.tensor(starts, device=shape.device),
                    places_N=torch.tensor(places, device=shape.device),
                )
                for each in (attend, plain_attention)
            )
            worst = max(worst, float((found_NQD - expected_NQD).abs().max()))
    return worst


def _kinds(
    shape: KvShape, sinks_Q: torch.Tensor
) -> list[tuple[int | None, float | None, torch.Tensor | None]]:
    """Windows, caps and sinks to check."""
    if not shape.windowed:
        return [(None, None, None)]
    return [(None, None, None), (20, None, None), (None, 5.0, None), (20, None, sinks_Q)]
