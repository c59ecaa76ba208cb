"""No way of training holds the logits of all tokens at once."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge.rl.config import LearnerConfig
from forge.rl.learner.learner import Learner
from forge.rl.model.capabilities import Way
from forge.rl.model.head_logprobs import kept_elements, table_rows
from forge.rl.model.policy import TreePolicy
from tests.support.rl.models import make_sample, tiny_model

VOCABULARY, TOKENS = 1999, 600


class LargestTable(TorchDispatchMode):
    """Counts the rows of the largest tensor [rows, vocabulary] that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(one, Tensor) and not one.is_meta and one.shape[-1:] == (VOCABULARY,):
                self.rows = max(self.rows, one.numel() // VOCABULARY)
        return found


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("qwen3", Way()),
        ("qwen3", Way(unmerged="for the test")),
        ("qwen3", Way(unmerged="for the test", separate=True)),
        ("gemma2", Way(unmerged="for the test")),
        ("llama4", None),
    ],
)
def test_largest_table_of_logits_has_the_rows_of_a_chunk(family: str, way: Way | None) -> None:
    """In forward and backward; with plain and capped logits, tied and untied heads."""
    model = tiny_model(family, torch.float32)
    model.resize_token_embeddings(VOCABULARY)
    policy = TreePolicy(model)
    if way is not None:
        policy.attention.use(way)
    assert bool(policy.unmerged) == (way != Way())
    learner = Learner(policy, LearnerConfig())
    rng = Random(0)
    ids = [rng.randrange(VOCABULARY) for _ in range(TOKENS)]
    plan = learner.plan([make_sample(ids, (1, TOKENS), rng=rng)])
    with LargestTable() as largest:
        learner.accumulate(plan)
    rows = table_rows(TOKENS * 16, (VOCABULARY, 16))
    assert 0 < largest.rows <= rows < TOKENS // 4
    assert kept_elements(TOKENS * 16) < VOCABULARY * TOKENS // 4
