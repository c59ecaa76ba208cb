"""Lightning attention against transformers' own layer."""

from __future__ import annotations

from copy import deepcopy
from inspect import unwrap
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxCache, MiniMaxLightningAttention

from forge.rl.model import lightning

_T = 19


class _States:
    """The state before the tokens, then that after them."""

    def __init__(self, state: Tensor | None) -> None:
        self.state = state

    def get_recurrent_state(self, layer_idx: int) -> Tensor | None:
        return self.state

    def update_recurrent_state(self, state: Tensor, layer_idx: int) -> None:
        self.state = state


def _layers() -> tuple[Any, Any]:
    """transformers' layer, and a copy of it with our forward; float64, blocks of 8 tokens."""
    torch.manual_seed(0)
    config = MiniMaxConfig(
        hidden_size=32,
        num_attention_heads=4,
        head_dim=8,
        num_hidden_layers=2,
        block_size=8,
        layer_types=["linear_attention", "full_attention"],
    )
    stock: Any = MiniMaxLightningAttention(config, 0).double()
    # It computes these in float32.
    decays = stock.decay_factors(stock.slope_rate)
    stock.query_decay, stock.key_decay, stock.diagonal_decay = decays
    ours = torch.nn.ModuleList([deepcopy(stock)])
    lightning.adopt(ours)
    return stock, ours[0]


@pytest.mark.parametrize("chunk", [1, 4, 8, 64])
def test_scan_of_any_chunk_is_that_of_the_stock_layer(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients, with padding at the end of a row; whole chunks and a rest."""
    # Tests that ran before may have wrapped it.
    scan: Any = unwrap(lightning.lightning_scan)
    monkeypatch.setitem(scan.__kwdefaults__, "chunk_size", chunk)
    stock, ours = _layers()
    hidden = torch.randn(2, _T, 32, dtype=torch.float64)
    mask = torch.ones(2, _T, dtype=torch.bool)
    mask[1, -5:] = False
    found = []
    for layer in (stock, ours):
        own = hidden.clone().requires_grad_()
        output, _ = layer(own, position_embeddings=None, attention_mask=mask)
        output.square().sum().backward()
        found.append([output, own.grad, *(one.grad for one in layer.parameters())])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("begin", [1, 7, 8, 18])
def test_state_continues_a_sequence(begin: int) -> None:
    """The tokens before and after a state, and the last state, are those of one pass."""
    stock, ours = _layers()
    hidden = torch.randn(2, _T, 32, dtype=torch.float64)
    cache = MiniMaxCache()
    whole, _ = stock(hidden, None, None, past_key_values=cache)
    states = _States(None)
    parts = [
        ours(part, past_key_values=states)[0] for part in (hidden[:, :begin], hidden[:, begin:])
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(states.state, cache.get_linear_cache(0), rtol=1e-10, atol=1e-12)


def test_state_is_wider_than_the_tokens() -> None:
    """The state of bfloat16 tokens is float32, so that later tokens do not add up its rounding."""
    query, key, value = torch.randn(3, 1, _T, 4, 8).bfloat16()
    slopes = torch.rand(4, 1, 1)
    output, state = lightning.lightning_scan(query, key, value, slopes)
    assert (output.dtype, state.dtype) == (torch.bfloat16, torch.float32)
