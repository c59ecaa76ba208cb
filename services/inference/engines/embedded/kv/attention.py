"""Connects the attention layers of any transformers model to the engine's keys and values.

A forward pass is packed: all tokens of all sequences are one row of length N, without padding. Each
attention layer passes q, k and v to the `KvPass` of the forward pass, which stores k and v and
attends over all stored ones.

Shape suffixes: N packed tokens, Q query heads, H key-value heads, D head size.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from forge.rl.numerics import attention_type, matrix_type
from services.inference.engines.embedded.kv.compiled_attention import (
    CompiledAttention,
    compiled_attention,
)

IMPLEMENTATION = "forge_kv"
_WIDENED_BYTES = 4 << 20
"""Keys that are widened at once: they stay in a processor's cache."""


class Heads(NamedTuple):
    """The input of one attention layer in a forward pass."""

    layer: int
    q_NQD: torch.Tensor
    k_NHD: torch.Tensor
    v_NHD: torch.Tensor
    scale: float | None
    """Factor of the logits; None: 1 over the root of D."""
    window: int | None
    """Tokens that a query sees, itself included; None: all."""
    softcap: float | None = None
    """Bound of the logits, by tanh; None: none."""
    sinks_Q: torch.Tensor | None = None
    """Logit of a key without a value, for each query head; None: none."""

    def to(self, dtype: torch.dtype) -> Heads:
        """Convert queries, keys and values."""
        q_NQD, k_NHD, v_NHD = (one.to(dtype) for one in (self.q_NQD, self.k_NHD, self.v_NHD))
        return self._replace(q_NQD=q_NQD, k_NHD=k_NHD, v_NHD=v_NHD)


class KvPass(Protocol):
    """Storage and attention of one forward pass."""

    def attend(self, heads: Heads) -> torch.Tensor:
        """Store this layer's keys and values; return the attention output, shape NQD."""


def exact_type(values: torch.Tensor) -> torch.dtype:
    """Type in which attention over these values adds up: on a CPU the trainer's, which decides
    where both round alike; on a GPU theirs, as its kernels add up in float32 by themselves."""
    return attention_type(values) if values.device.type == "cpu" else values.dtype


def attention(
    q_ABSD: torch.Tensor,
    k_ABTD: torch.Tensor,
    v_ABTD: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    heads: Heads,
    is_causal: bool = False,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one layer, [A, B, S, D], in the type of q and `bias`; without `bias` causal or
    over all keys. `sinks`: those of `heads`, in a shape that broadcasts to [A, B, S]. A cap takes
    the plain computation, as in transformers: no kernel of torch has one."""
    if heads.softcap is None and sinks is None and k_ABTD.dtype == q_ABSD.dtype:
        return scaled_dot_product_attention(
            q_ABSD, k_ABTD, v_ABTD, attn_mask=bias, is_causal=is_causal, scale=heads.scale
        )
    read_ABSD, lse_ABS = attention_with_lse(
        q_ABSD,
        k_ABTD,
        v_ABTD,
        bias=bias,
        scale=heads.scale,
        softcap=heads.softcap,
        is_causal=is_causal,
    )
    return read_ABSD if sinks is None else with_sinks(read_ABSD, lse_ABS, sinks)


def with_sinks(read_ABSD: torch.Tensor, lse_ABS: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Let sinks take their share of the probability; `lse_ABS` is that of the scores without."""
    share_ABS = torch.sigmoid(lse_ABS - sinks.to(lse_ABS.dtype))
    return (read_ABSD * share_ABS[..., None]).to(read_ABSD.dtype)


def attention_with_lse(
    q_ABSD: torch.Tensor,
    k_ABTD: torch.Tensor,
    v_ABTD: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    scale: float | None,
    softcap: float | None = None,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and the log-sum-exp of its scores [A, B, S] in float32 or wider; by a kernel on a
    CPU without a cap, else by the plain computation. Keys and values in a narrower type than q are
    read by the compiled code, or widened, a few heads at a time."""
    if k_ABTD.dtype != q_ABSD.dtype:
        plain = softcap is None and not is_causal
        if plain and CompiledAttention.takes(q_ABSD, k_ABTD, v_ABTD):
            compiled = compiled_attention()
            if compiled is not None:
                return compiled(q_ABSD, k_ABTD, v_ABTD, bias=bias, scale=scale)
        return _widened_attention(
            q_ABSD, k_ABTD, v_ABTD, bias=bias, scale=scale, softcap=softcap, is_causal=is_causal
        )
    if q_ABSD.device.type == "cpu" and softcap is None:
        read_ABSD, lse_ABS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_ABSD, k_ABTD, v_ABTD, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        return read_ABSD, lse_ABS
    return _plain_attention(
        q_ABSD, k_ABTD, v_ABTD, bias=bias, scale=scale, softcap=softcap, is_causal=is_causal
    )


def _widened_attention(
    q_ABSD: torch.Tensor,
    k_ABTD: torch.Tensor,
    v_ABTD: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention_with_lse` of narrower keys and values, widened a few heads at a time."""
    read_ABSD, lse_ABS = torch.empty_like(q_ABSD), q_ABSD.new_empty(q_ABSD.shape[:3])
    for rows, kv_heads in _parts(k_ABTD, q_ABSD.dtype):
        part = (rows, kv_heads)
        k_part, v_part = _scratch.widened(k_ABTD[part], v_ABTD[part], q_ABSD.dtype)
        read_ABSD[part], lse_ABS[part] = attention_with_lse(
            q_ABSD[part],
            k_part,
            v_part,
            bias=None if bias is None else bias[rows],
            scale=scale,
            softcap=softcap,
            is_causal=is_causal,
        )
    return read_ABSD, lse_ABS


def _plain_attention(
    q_ABSD: torch.Tensor,
    k_ABTD: torch.Tensor,
    v_ABTD: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention_with_lse` from scores in memory."""
    scale = q_ABSD.shape[-1] ** -0.5 if scale is None else scale
    scores_ABST = q_ABSD @ k_ABTD.transpose(-1, -2) * scale
    if softcap is not None:
        scores_ABST = torch.tanh(scores_ABST / softcap) * softcap
    if is_causal:
        positions_S = torch.arange(q_ABSD.shape[-2], device=q_ABSD.device)
        bias = attention_bias(positions_S, len(positions_S), window=None, dtype=q_ABSD.dtype)
    if bias is not None:
        scores_ABST = scores_ABST + bias
    scores_ABST = scores_ABST.to(torch.promote_types(q_ABSD.dtype, torch.float32))
    return scores_ABST.softmax(-1).to(q_ABSD.dtype) @ v_ABTD, scores_ABST.logsumexp(-1)


class _Scratch(threading.local):
    """Memory of a thread for widened keys and values: fresh memory takes longer to map than to
    fill."""

    def __init__(self) -> None:
        # Not of the inference mode: a tensor of that mode cannot be written outside of it.
        with torch.inference_mode(False):
            self._bytes = torch.empty(2 * _WIDENED_BYTES, dtype=torch.uint8)

    def widened(
        self, k: torch.Tensor, v: torch.Tensor, kind: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one shape in a wider type, until the next call."""
        half = k.numel() * kind.itemsize
        if 2 * half > len(self._bytes):
            return k.to(kind), v.to(kind)
        places = (self._bytes[:half], self._bytes[half : 2 * half])
        k_wide, v_wide = (one.view(kind).view(k.shape) for one in places)
        return k_wide.copy_(k), v_wide.copy_(v)


_scratch = _Scratch()


def _parts(k_ABTD: torch.Tensor, kind: torch.dtype) -> Iterator[tuple[slice, slice]]:
    """Rows and heads whose keys take `_WIDENED_BYTES` in this type, or one head of one row."""
    rows, kv_heads, tokens, size = k_ABTD.shape
    most = max(1, _WIDENED_BYTES // max(1, tokens * size * kind.itemsize))
    height, width = max(1, most // kv_heads), min(most, kv_heads)
    for row in range(0, rows, height):
        for head in range(0, kv_heads, width):
            yield slice(row, row + height), slice(head, head + width)


def attention_bias(
    positions_R: torch.Tensor, length: int, *, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """0 for the keys up to a row's position and inside the window, -inf for others: [R, length]."""
    keys_T = torch.arange(length, device=positions_R.device)
    hidden_RT = keys_T > positions_R[:, None]
    if window is not None:
        hidden_RT |= keys_T <= positions_R[:, None] - window
    bias_RT = torch.zeros(hidden_RT.shape, dtype=dtype, device=positions_R.device)
    return bias_RT.masked_fill_(hidden_RT, -torch.inf)


def implementation(  # noqa: PLR0913
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kv_pass: KvPass,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of transformers' layers: that of `kv_pass`."""
    layer = module.layer_idx
    assert isinstance(layer, int)
    kind, values = matrix_type(value), value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Keys and values are stored with one size; zeros change neither scores nor sums.
    size = max(key.shape[-1], values)
    q_NQD, k_NHD, v_NHD = (
        _widened(each[0].to(kind), size).transpose(0, 1) for each in (query, key, value)
    )
    heads = Heads(layer, q_NQD, k_NHD, v_NHD, scale, sliding_window, softcap, s_aux)
    device = value.device.type
    casts = torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False) if casts else nullcontext():
        return kv_pass.attend(heads)[None, ..., :values], None


def _widened(values: torch.Tensor, size: int) -> torch.Tensor:
    missing = size - values.shape[-1]
    # Most models need no zeros, and `pad` would copy.
    return pad(values, (0, missing)) if missing else values


def register(name: str = IMPLEMENTATION, function: Any = implementation) -> None:
    """Register the implementation with transformers; idempotent. Without a mask of its own: the
    KvPass owns it, and transformers then prepares none."""
    AttentionInterface.register(name, function)
