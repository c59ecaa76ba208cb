"""The chunked head computes what log_softmax over all logits would."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from forge.rl.model import head_logprobs
from forge.rl.model.head_logprobs import Logits, distributions, edge_logprobs
from forge.rl.tree.parts import HeadRows

TOKENS, CHANNELS, VOCABULARY = 7, 5, 11


def head_rows() -> HeadRows:
    """Four rows at two temperatures; the second has three edges, the third none."""
    return HeadRows(
        places_R=torch.tensor([0, 2, 2, 6]),
        temperatures_R=torch.tensor([1.0, 1.0, 0.5, 2.0]),
        rows_E=torch.tensor([0, 1, 1, 1, 3]),
        targets_E=torch.tensor([3, 0, 10, 10, 4]),
    )


def expected(
    hidden: Tensor, weight: Tensor, norm: nn.Module | None, form: Logits
) -> tuple[Tensor, Tensor]:
    """The plain formula, over all logits."""
    head = head_rows()
    rows = hidden[head.places_R] if norm is None else norm(hidden[head.places_R])
    logits = nn.functional.linear(rows, weight, form.bias_V) * form.scale
    if form.softcap:
        logits = (logits / form.softcap).tanh() * form.softcap
    everything = (logits / head.temperatures_R[:, None]).log_softmax(-1)
    entropy = -(everything.exp() * everything).sum(-1)
    return everything[head.rows_E, head.targets_E], entropy


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 100])
@pytest.mark.parametrize("kept_rows", [0, 2, 100])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("form", [Logits(), Logits(scale=0.3), Logits(scale=2.0, softcap=0.8)])
def test_chunks_change_neither_values_nor_gradients(
    chunk_rows: int, kept_rows: int, normed: bool, form: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any cut of the rows, kept or recomputed, fp64 values and gradients equal the plain
    formula's, also those of the norm; with scaled and capped logits, too."""
    monkeypatch.setattr(head_logprobs, "kept_elements", lambda states: kept_rows * VOCABULARY)
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, CHANNELS, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, CHANNELS, dtype=torch.float64, requires_grad=True)
    norm = nn.LayerNorm(CHANNELS, dtype=torch.float64) if normed else None
    upstream = torch.randn(len(head_rows().rows_E), dtype=torch.float64)
    roots = [hidden, weight, *(norm.parameters() if norm else ())]

    values, entropies = expected(hidden, weight, norm, form)
    gradients = torch.autograd.grad(values, roots, upstream)
    actual, entropy = edge_logprobs(
        hidden, weight, head_rows(), norm=norm, logits=form, chunk_rows=chunk_rows
    )
    torch.testing.assert_close(actual, values, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(entropy, entropies, rtol=1e-13, atol=1e-13)
    for mine, theirs in zip(torch.autograd.grad(actual, roots, upstream), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk_rows", [1, 3])
@pytest.mark.parametrize("kept_rows", [0, 100])
@pytest.mark.parametrize("form", [Logits(), Logits(scale=0.3), Logits(scale=2.0, softcap=0.8)])
def test_bias_of_a_head_is_exact(
    chunk_rows: int, kept_rows: int, form: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Added before scale, cap and temperature; its gradient, too, equals the plain formula's."""
    monkeypatch.setattr(head_logprobs, "kept_elements", lambda states: kept_rows * VOCABULARY)
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, CHANNELS, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, CHANNELS, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(VOCABULARY, dtype=torch.float64, requires_grad=True)
    form, roots = replace(form, bias_V=bias), [hidden, weight, bias]
    upstream = torch.randn(len(head_rows().rows_E), dtype=torch.float64)

    values, entropies = expected(hidden, weight, None, form)
    gradients = torch.autograd.grad(values, roots, upstream)
    actual, entropy = edge_logprobs(hidden, weight, head_rows(), logits=form, chunk_rows=chunk_rows)
    torch.testing.assert_close(actual, values, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(entropy, entropies, rtol=1e-13, atol=1e-13)
    for mine, theirs in zip(torch.autograd.grad(actual, roots, upstream), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    head = head_rows()
    all_RV = distributions(hidden[head.places_R], weight, head.temperatures_R.double(), form)
    torch.testing.assert_close(all_RV[head.rows_E, head.targets_E], values)
    grads = torch.autograd.grad(all_RV.sum(), roots, allow_unused=True)
    assert [one is not None for one in grads] == [True, False, False]


@pytest.mark.parametrize("chunk_rows", [1, 3])
@pytest.mark.parametrize("kept_rows", [0, 100])
def test_entropy_gradient_equals_finite_differences(
    chunk_rows: int, kept_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp64, with respect to states, head and norm, together with that of the log-probs."""
    monkeypatch.setattr(head_logprobs, "kept_elements", lambda states: kept_rows * VOCABULARY)
    torch.manual_seed(0)
    norm = nn.LayerNorm(CHANNELS, dtype=torch.float64)
    hidden = torch.randn(TOKENS, CHANNELS, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, CHANNELS, dtype=torch.float64, requires_grad=True)

    def both(hidden: Tensor, weight: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return edge_logprobs(
            hidden, weight, head_rows(), norm=norm, chunk_rows=chunk_rows, entropy_gradient=True
        )

    assert torch.autograd.gradcheck(both, (hidden, weight, *norm.parameters()))


def test_entropy_of_a_certain_token_has_no_gradient() -> None:
    """A probability that rounds to 0 adds 0, not nan."""
    hidden = torch.eye(CHANNELS)[:1].repeat(TOKENS, 1).requires_grad_()
    weight = torch.zeros(VOCABULARY, CHANNELS)
    weight[3, 0] = 500.0
    _, entropy = edge_logprobs(hidden, weight, head_rows(), entropy_gradient=True)
    entropy.sum().backward()
    assert hidden.grad is not None and not hidden.grad.any()


def test_entropy_without_a_bonus_has_no_gradient() -> None:
    """It is a statistic then, at no cost in the backward."""
    hidden = torch.randn(TOKENS, CHANNELS, requires_grad=True)
    _, entropy = edge_logprobs(hidden, torch.randn(VOCABULARY, CHANNELS), head_rows())
    assert not entropy.requires_grad


def test_retained_graph_gives_the_same_gradient_again() -> None:
    """The second backward recomputes what the first one freed."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, CHANNELS, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, CHANNELS, dtype=torch.float64, requires_grad=True)
    values, _ = edge_logprobs(hidden, weight, head_rows(), chunk_rows=2)
    first = torch.autograd.grad(values.sum(), [hidden, weight], retain_graph=True)
    again = torch.autograd.grad(values.sum(), [hidden, weight])
    torch.testing.assert_close(again, first, rtol=1e-13, atol=1e-13)


def test_frozen_head_gets_no_gradient_and_states_get_theirs() -> None:
    """As with adapters, where head and norm are frozen."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, CHANNELS, requires_grad=True)
    weight, norm = torch.randn(VOCABULARY, CHANNELS), nn.LayerNorm(CHANNELS).requires_grad_(False)
    values, _ = expected(hidden, weight, norm, Logits())
    (gradient,) = torch.autograd.grad(values.sum(), [hidden])
    edge_logprobs(hidden, weight, head_rows(), norm=norm)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None and norm.weight.grad is None
    torch.testing.assert_close(hidden.grad, gradient)


def test_only_states_before_the_norm_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither normed states nor logits, once these are too many to keep."""
    monkeypatch.setattr(head_logprobs, "kept_elements", lambda states: 0)
    norm, weight = nn.LayerNorm(CHANNELS), torch.randn(VOCABULARY, CHANNELS, requires_grad=True)
    hidden = torch.randn(TOKENS, CHANNELS, requires_grad=True)
    held: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        edge_logprobs(hidden, weight, head_rows(), norm=norm)
    rows, parameters = len(head_rows().places_R), [tuple(one.shape) for one in norm.parameters()]
    assert sorted(held) == sorted(
        [(rows,), (rows, CHANNELS), (VOCABULARY, CHANNELS), *parameters]
    ), held


def test_head_is_fp32_under_autocast() -> None:
    """bf16 hidden states give fp32 logits."""
    hidden = torch.randn(TOKENS, CHANNELS).bfloat16()
    weight = torch.randn(VOCABULARY, CHANNELS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, entropy = edge_logprobs(hidden, weight, head_rows())
    exact, _ = edge_logprobs(hidden.double(), weight.double(), head_rows())
    assert actual.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(actual, exact.float(), rtol=1e-5, atol=1e-5)
