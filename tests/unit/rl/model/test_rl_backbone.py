"""The states before a model's last norm, where that is what its head begins with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from forge.core.errors import InvalidArgument
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


class Headed(nn.Module):
    """An embedding and a head, which its forward calls some times; it scales the logits."""

    def __init__(self, *, calls: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)
        self._calls = calls

    @property
    def base_model(self) -> nn.Module:
        return self

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        states = self.embedding(input_ids)
        logits = sum(self.head(states) for _ in range(self._calls))
        return SimpleNamespace(logits=logits * 2.0)


def test_pass_up_to_the_head_returns_the_input_of_the_head() -> None:
    """The head computes nothing meanwhile, and computes as before afterwards."""
    model, ids = Headed(calls=1), torch.tensor([[1, 4, 2]])
    logits = model(ids).logits
    found = Backbone(model).up_to_head({"input_ids": ids})
    assert torch.equal(found.states_LC, model.embedding(ids)[0]) and found.norm is None
    assert found.states_LC.requires_grad and model.head.weight.grad is None
    assert torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize("calls", [0, 2])
def test_model_that_computes_logits_otherwise_is_refused(calls: int) -> None:
    """Its log-probs are not those of one input of its head."""
    with pytest.raises(InvalidArgument, match=r"Headed does not compute logits by its head alone"):
        Backbone(Headed(calls=calls)).up_to_head({"input_ids": torch.tensor([[1, 4, 2]])})
