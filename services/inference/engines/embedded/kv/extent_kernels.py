"""Attention of new tokens over the extents of their sequences, as Triton kernels.

Each new token reads its sequence up to itself. Its keys and values are divided among programs, so
that few sequences with long contexts use the whole device; a second kernel joins the parts by their
log-sum-exp. Only lengths in memory decide how much is read: a captured graph fits all lengths.

Imported on a device with Triton alone.

Shape suffixes: N new tokens, Q query heads, H key-value heads, G = Q / H, S parts, T tokens, D head
size.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from services.inference.engines.embedded.kv.attention import Heads
from services.inference.engines.embedded.kv.device_attention import ExtentAttention

_MOST_PARTS = 32
_WAVES = 2
"""Programs for each multiprocessor, with which a device is busy."""


@triton.jit  # type: ignore[untyped-decorator]
def _part(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    q_ptr, k_ptr, v_ptr, starts_ptr, places_ptr, out_ptr, lse_ptr,
    scale, softcap, window,
    q_stride_n, q_stride_q, kv_stride_h,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """The attention of one token's query heads of one key-value head over one part of the keys."""
    n = tl.program_id(0)
    h = tl.program_id(1)
    s = tl.program_id(2)
    start = tl.load(starts_ptr + n)
    end = tl.load(places_ptr + n) + 1
    first = end * 0
    if HAS_WINDOW:
        first = tl.maximum(first, end - window)
    part = tl.cdiv(tl.cdiv(end - first, S), BLOCK_T) * BLOCK_T
    low = first + s * part
    high = tl.minimum(low + part, end)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    t = tl.arange(0, BLOCK_T)
    q = tl.load(
        q_ptr + n * q_stride_n + (h * G + g)[:, None] * q_stride_q + d[None, :],
        mask=(g < G)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    k_head = k_ptr + h.to(tl.int64) * kv_stride_h
    v_head = v_ptr + h.to(tl.int64) * kv_stride_h
    most = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    read = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for at in range(low, high, BLOCK_T):
        seen = at + t < high
        rows = (start + at + t).to(tl.int64) * D
        k = tl.load(
            k_head + rows[None, :] + d[:, None],
            mask=seen[None, :] & (d < D)[:, None],
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if HAS_CAP:
            # tanh, without overflow.
            tail = tl.exp(-2.0 * tl.abs(scores / softcap))
            size = (1.0 - tail) / (1.0 + tail) * softcap
            scores = tl.where(scores < 0, -size, size)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        shares = tl.exp(scores - higher[:, None])
        kept = tl.exp(most - higher)
        v = tl.load(
            v_head + rows[:, None] + d[None, :],
            mask=seen[:, None] & (d < D)[None, :],
            other=0.0,
        )
        read = read * kept[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
        total = total * kept + tl.sum(shares, 1)
        most = higher
    # A part without keys has total 0: its log-sum-exp is -inf, and it reads zeros.
    read = read / tl.where(total > 0, total, 1.0)[:, None]
    lse = tl.where(total > 0, most + tl.log(total), float("-inf"))
    at = (n * H * G + h * G + g) * S + s
    tl.store(
        out_ptr + at[:, None] * D + d[None, :],
        read.to(out_ptr.dtype.element_ty),
        mask=(g < G)[:, None] & (d < D)[None, :],
    )
    tl.store(lse_ptr + at, lse, mask=g < G)


@triton.jit  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    parts_ptr, lse_ptr, sinks_ptr, out_ptr,
    Q: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Join the parts of one query head; a sink is one more key, without a value."""
    n = tl.program_id(0)
    q = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, S)
    at = (n * Q + q) * S
    lse = tl.load(lse_ptr + at + s)
    most = tl.max(lse, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + q).to(tl.float32)
        most = tl.maximum(most, sink)
    shares = tl.exp(lse - most)
    total = tl.sum(shares, 0)
    if HAS_SINKS:
        total += tl.exp(sink - most)
    parts = tl.load(
        parts_ptr + (at + s)[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0
    )
    read = tl.sum(parts * (shares / total)[:, None], 0)
    tl.store(out_ptr + (n * Q + q) * D + d, read.to(out_ptr.dtype.element_ty), mask=d < D)


def attention_on(device: torch.device) -> ExtentAttention:
    """The attention for a device."""
    programs = _WAVES * torch.cuda.get_device_properties(device).multi_processor_count
    return partial(attend, programs=programs)


def attend(
    heads: Heads,
    k_HTD: torch.Tensor,
    v_HTD: torch.Tensor,
    *,
    starts_N: torch.Tensor,
    places_N: torch.Tensor,
    programs: int,
) -> torch.Tensor:
    """Attention of the queries of `heads`, [N, Q, D]: the token n sees the tokens from `starts_N`
    to its own, `places_N` further. `programs`: as many as use the whole device."""
    assert starts_N.is_contiguous()
    assert places_N.is_contiguous()
    q_NQD = heads.q_NQD if heads.q_NQD.stride(2) == 1 else heads.q_NQD.contiguous()
    count, queries, size = q_NQD.shape
    kv_heads = len(k_HTD)
    groups = queries // kv_heads
    parts = 1
    while parts < _MOST_PARTS and 2 * parts * count * kv_heads <= programs:
        parts *= 2
    block_d = triton.next_power_of_2(size)
    joined = parts > 1 or heads.sinks_Q is not None
    kind = torch.float32 if joined else q_NQD.dtype
    out_NQSD = q_NQD.new_empty((count, queries, parts, size), dtype=kind)
    lse_NQS = q_NQD.new_empty((count, queries, parts), dtype=torch.float32)
    _part[(count, kv_heads, parts)](
        q_NQD, k_HTD, v_HTD, starts_N, places_N, out_NQSD, lse_NQS,
        size**-0.5 if heads.scale is None else heads.scale,
        heads.softcap or 1.0, heads.window or 0,
        q_NQD.stride(0), q_NQD.stride(1), k_HTD.stride(0),
        H=kv_heads, G=groups, D=size, S=parts,
        BLOCK_G=max(16, triton.next_power_of_2(groups)), BLOCK_D=max(16, block_d),
        BLOCK_T=64 if block_d <= 128 and q_NQD.dtype.itemsize <= 2 else 32,
        HAS_WINDOW=heads.window is not None, HAS_CAP=heads.softcap is not None,
    )  # fmt: skip
    if not joined:
        return out_NQSD[:, :, 0]
    out_NQD = torch.empty_like(q_NQD, memory_format=torch.contiguous_format)
    _join[(count, queries)](
        out_NQSD, lse_NQS, lse_NQS if heads.sinks_Q is None else heads.sinks_Q, out_NQD,
        Q=queries, D=size, S=parts, BLOCK_D=max(16, block_d), HAS_SINKS=heads.sinks_Q is not None,
    )  # fmt: skip
    return out_NQD
