"""Products of the head in bf16 parts are as exact as fp32 ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge.rl.model import head_logprobs, wide_products
from forge.rl.model.wide_products import PartProducts, PlainProducts, parts_of, products_of
from forge.rl.tree.parts import HeadRows

ROWS, CHANNELS, VOCABULARY = 6, 40, 50


def tensors() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return 3 * torch.randn(ROWS, CHANNELS), torch.randn(VOCABULARY, CHANNELS) / 6


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def test_three_parts_are_the_number() -> None:
    """Their sum has every bit of an fp32 number, also of small ones."""
    values = torch.randn(1000) * torch.logspace(-20, 20, 1000)
    parts = [part.double() for part in parts_of(values, 3)]
    assert torch.equal(torch.stack(parts).sum(0), values.double())


@pytest.mark.parametrize(("published", "parts"), [(True, 1), (False, 3)])
def test_logits_in_parts_are_as_exact_as_in_fp32(
    published: bool, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For weights that are bf16 numbers, which have one part, and for others; weights are divided
    in slices."""
    monkeypatch.setattr(wide_products, "SLICE_ROWS", 7)
    states_rC, weight_VC = tensors()
    weight_VC = weight_VC.bfloat16().float() if published else weight_VC
    expected = states_rC.double() @ weight_VC.double().T
    products = PartProducts(weight_VC)
    assert len(products._weights) == parts
    assert error(products.logits(states_rC), expected) <= 2e-7
    assert error(states_rC.bfloat16().float() @ weight_VC.T, expected) >= 1e-4


def test_gradients_in_one_product_are_rounded_like_the_backbone() -> None:
    """To bf16, and added in fp32 to the gradient so far."""
    states_rC, weight_VC = tensors()
    products, plain = PartProducts(weight_VC), PlainProducts(weight_VC)
    grad_rV = torch.randn(ROWS, VOCABULARY)
    assert error(products.to_states(grad_rV), plain.to_states(grad_rV).double()) <= 5e-3
    totals = [torch.ones(VOCABULARY, CHANNELS) for _ in range(2)]
    products.add_to_weight(totals[0], grad_rV, states_rC)
    plain.add_to_weight(totals[1], grad_rV, states_rC)
    assert error(totals[0], totals[1].double()) <= 5e-3


def test_parts_are_for_bf16_backbones_on_a_gpu() -> None:
    """A CPU multiplies fp32 as fast, and a backbone in fp32 wants exact gradients."""
    _, weight_VC = tensors()
    assert isinstance(products_of(weight_VC, backbone=torch.bfloat16), PlainProducts)
    assert isinstance(products_of(weight_VC, backbone=None), PlainProducts)


def test_log_probs_from_parts_are_those_from_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs and entropies agree to fp32's rounding, gradients to that of bf16."""
    states_rC, weight_VC = tensors()
    head = HeadRows(
        places_R=torch.arange(ROWS),
        temperatures_R=torch.tensor([1.0, 0.7]).repeat(ROWS // 2),
        rows_E=torch.arange(ROWS),
        targets_E=torch.arange(ROWS) * 7,
    )
    found = []
    for parts in (False, True):
        if parts:
            monkeypatch.setattr(
                head_logprobs, "products_of", lambda one, backbone: PartProducts(one)
            )
        states, weight = (one.clone().requires_grad_() for one in (states_rC, weight_VC))
        logprobs_E, entropy_R = head_logprobs.edge_logprobs(states, weight, head, chunk_rows=4)
        logprobs_E.square().sum().backward()
        found.append([logprobs_E.detach(), entropy_R, states.grad, weight.grad])
    for mine, other, limit in zip(*found[::-1], (1e-6, 1e-6, 1e-2, 1e-2), strict=True):
        assert mine is not None and other is not None
        assert error(mine, other.double()) <= limit
