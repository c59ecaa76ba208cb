"""Tied weights are published once, with all their names."""

from __future__ import annotations

import torch

from services.trainer.model.full_weights import Trainee


class Tied(torch.nn.Module):
    """An embedding that is the head, too, as transformers ties them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 2)
        self.norm = torch.nn.LayerNorm(2)
        self.head = torch.nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_are_published_once_with_their_names() -> None:
    """The manifest has the further names: an engine that does not tie them needs both."""
    trainee = Trainee(Tied())
    assert [name for name, _ in trainee.published()] == list(trainee.shapes())
    assert list(trainee.shapes()) == ["embed.weight", "norm.weight", "norm.bias"]
    assert trainee.tied_names() == {"embed.weight": ["head.weight"]}
