"""The states before a model's last norm, where that is what its head begins with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from forge.rl.model.backbone import Backbone


class Layers(nn.Module):
    """One layer, a norm, and perhaps something after it."""

    def __init__(self, after: float) -> None:
        super().__init__()
        self.layer, self.final_layernorm = nn.Linear(3, 3), nn.LayerNorm(3)
        self.after = after

    def forward(self, states: Tensor) -> SimpleNamespace:
        normed = self.final_layernorm(self.layer(states))
        return SimpleNamespace(last_hidden_state=normed * self.after if self.after else normed)


@pytest.mark.parametrize("wanted", [False, True])
def test_last_norm_is_computed_in_the_head(wanted: bool) -> None:
    """The head gets the states before the norm, and its result equals the model's; the normed copy
    has no gradient."""
    layers = Layers(0)
    model = SimpleNamespace(base_model=layers)
    states = torch.randn(1, 4, 3)
    expected = model.base_model(states).last_hidden_state[0]
    found = Backbone(model)({"states": states}, normed=wanted)
    assert found.norm is model.base_model.final_layernorm
    assert torch.equal(found.norm(found.states_LC), expected)
    assert (found.normed_LC is not None) == wanted
    if found.normed_LC is not None:
        assert torch.equal(found.normed_LC, expected) and not found.normed_LC.requires_grad
    assert not layers.final_layernorm._forward_hooks


def test_norm_that_is_not_last_stays_in_the_model() -> None:
    """The states are then the model's own output."""
    model = SimpleNamespace(base_model=Layers(2.0))
    states = torch.randn(1, 4, 3)
    found = Backbone(model)({"states": states}, normed=False)
    assert found.norm is None
    assert torch.equal(found.states_LC, model.base_model(states).last_hidden_state[0])
