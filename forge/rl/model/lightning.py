"""Lightning attention (MiniMax-01, MiniMax-M1) in the form of transformers' other recurrent layers.

transformers' own layer takes its state from a cache of another kind, and computes many tokens after
a state one by one. Owns the scan by chunks that begins with a state, and the forward with it, on
the layer's own modules.

Shapes: B rows, T tokens, H heads, D channels of a head, C hidden channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_STOCK = "MiniMaxLightningAttention"
_CHUNK = 64
"""Tokens that a scan computes at once: pairs of tokens cost as much as their states then."""


def adopt(model: nn.Module) -> None:
    """Give the lightning layers of a model this forward. Idempotent."""
    for layer in model.modules():
        if type(layer).__name__ == _STOCK:
            layer.__class__ = LightningAttention


def lightning_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slope_rate: Tensor,
    *,
    initial_state: Tensor | None = None,
    chunk_size: int = _CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return outputs, [B, T, H, D], and the state after the last token, [B, H, D, D].

    After token t the state is `exp(-slope) state + key_t^T value_t`, and its output
    `query_t state`. `query`, `key`, `value`: [B, T, H, D]; `slope_rate`: [H, 1, 1];
    `initial_state`: zeros by default.
    """
    kind = torch.promote_types(query.dtype, torch.float32)
    slope_rate = slope_rate.to(kind)
    queries, keys, values = (one.to(kind).transpose(1, 2) for one in (query, key, value))
    rows, heads, tokens, size = keys.shape
    state = keys.new_zeros((rows, heads, size, values.shape[-1]))
    if initial_state is not None:
        state = initial_state.to(kind)
    outputs = []
    # No reduced type: the products of decays lose more than one of attention would.
    with torch.autocast(query.device.type, enabled=False):
        for begin in range(0, tokens, chunk_size):
            part = slice(begin, min(begin + chunk_size, tokens))
            own_queries, own_keys = queries[:, :, part], keys[:, :, part]
            own_values = values[:, :, part]
            place_T1 = torch.arange(1, own_keys.shape[2] + 1, device=query.device)[:, None]
            age_TT = place_T1 - place_T1.T
            decay_HTT = torch.exp(-slope_rate * age_TT.clamp(min=0)).tril()
            within = (own_queries @ own_keys.transpose(-1, -2) * decay_HTT) @ own_values
            outputs.append(within + own_queries * torch.exp(-slope_rate * place_T1) @ state)
            left_HT1 = torch.exp(-slope_rate * (place_T1[-1] - place_T1))
            kept = torch.exp(-slope_rate * place_T1[-1]) * state
            state = kept + (own_keys * left_HT1).transpose(-1, -2) @ own_values
    return torch.cat(outputs, dim=2).transpose(1, 2).to(query.dtype), state


class LightningAttention(nn.Module):
    """A lightning layer of MiniMax, with its own parameters. Its forward returns a tensor, as that
    of other recurrent layers; a call returns what MiniMax's decoder layers unpack."""

    layer_idx: int
    num_attention_heads: int
    head_dim: int
    slope_rate: Tensor
    act_fn: nn.Module
    norm: nn.Module
    output_gate: nn.Module
    qkv_proj: nn.Module
    out_proj: nn.Module

    def __call__(self, *given: Any, **named: Any) -> tuple[Tensor, None]:
        """The forward's output, and no weights of attention."""
        return super().__call__(*given, **named), None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Tensor:
        """Compute tokens after the state of a cache; without a cache, from the start. Shapes:
        [B, T, C]; `attention_mask`: [B, T], 0 for padding."""
        qkv = self.act_fn(self.qkv_proj(hidden_states))
        if attention_mask is not None:
            qkv = (qkv * attention_mask[:, :, None]).to(qkv.dtype)
        heads = qkv.unflatten(-1, (self.num_attention_heads, 3 * self.head_dim))
        query, key, value = heads.split(self.head_dim, dim=-1)
        before = None
        if past_key_values is not None:
            before = past_key_values.get_recurrent_state(self.layer_idx)
        output, after = lightning_scan(query, key, value, self.slope_rate, initial_state=before)
        if past_key_values is not None:
            past_key_values.update_recurrent_state(after, self.layer_idx)
        gate = torch.sigmoid(self.output_gate(hidden_states))
        projected: Tensor = self.out_proj(gate * self.norm(output.flatten(-2)))
        return projected
