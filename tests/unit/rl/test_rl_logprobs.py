"""The chunked head computes what log_softmax over all logits would."""

from __future__ import annotations

import pytest
import torch

from forge.rl.logprobs import edge_logprobs
from forge.rl.tree_batch import HeadRows

TOKENS, CHANNELS, VOCABULARY = 7, 5, 11


def head_rows() -> HeadRows:
    """Four rows at two temperatures; the second has three edges, the third none."""
    return HeadRows(
        places_R=torch.tensor([0, 2, 2, 6]),
        temperatures_R=torch.tensor([1.0, 1.0, 0.5, 2.0]),
        rows_E=torch.tensor([0, 1, 1, 1, 3]),
        targets_E=torch.tensor([3, 0, 10, 10, 4]),
    )


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 100])
def test_chunks_change_neither_values_nor_gradients(chunk_rows: int) -> None:
    """However the rows are cut, fp64 values and gradients are those of the plain formula."""
    torch.manual_seed(0)
    head = head_rows()
    hidden = torch.randn(TOKENS, CHANNELS, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, CHANNELS, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(len(head.rows_E), dtype=torch.float64)

    logits = (hidden[head.places_R] @ weight.T) / head.temperatures_R[:, None]
    everything = logits.log_softmax(-1)
    expected = everything[head.rows_E, head.targets_E]
    expected_entropy = -(everything.exp() * everything).sum(-1)
    gradients = torch.autograd.grad(expected, (hidden, weight), upstream)

    actual, entropy = edge_logprobs(hidden, weight, head, chunk_elements=chunk_rows * VOCABULARY)
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-13, atol=1e-13)
    for mine, theirs in zip(
        torch.autograd.grad(actual, (hidden, weight), upstream), gradients, strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_the_head_is_fp32_under_autocast() -> None:
    """bf16 hidden states meet fp32 logits, whatever autocast says."""
    hidden = torch.randn(TOKENS, CHANNELS).bfloat16()
    weight = torch.randn(VOCABULARY, CHANNELS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, entropy = edge_logprobs(hidden, weight, head_rows())
    exact, _ = edge_logprobs(hidden.double(), weight.double(), head_rows())
    assert actual.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(actual, exact.float(), rtol=1e-5, atol=1e-5)
