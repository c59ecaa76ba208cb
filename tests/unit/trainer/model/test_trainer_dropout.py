"""A model is trained without the dropout that its configuration asks for."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM, PhiConfig, PhiForCausalLM

from forge.rl.config import LearnerConfig
from forge.rl.learner.learner import Learner
from forge.rl.model.policy import TreePolicy
from forge.rl.model.probe import check_policy
from services.trainer.model.full_weights import load_model
from tests.support.rl.models import make_sample

SHAPE: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 1,
}


@pytest.mark.parametrize("family", ["phi", "opt"])
def test_model_with_dropout_is_trained_without_it(family: str, tmp_path: Path) -> None:
    """Log-probs of a step equal those of sampling, in every call."""
    if family == "phi":
        shape = PhiConfig(**SHAPE, intermediate_size=32, resid_pdrop=0.1, embd_pdrop=0.1)
        saved: Any = PhiForCausalLM(shape)
    else:
        saved = OPTForCausalLM(OPTConfig(**SHAPE, ffn_dim=32, word_embed_proj_dim=32, dropout=0.1))
    saved.save_pretrained(tmp_path)
    policy = TreePolicy(load_model(tmp_path))
    check_policy(policy)
    assert not policy.unmerged
    rng = Random(0)
    samples = [make_sample([1, 2, 3, 4, 5, n], (3, 6), rng=rng) for n in range(6, 9)]
    (tree,) = Learner(policy, LearnerConfig()).plan(samples).trees
    once, again = (policy.logprobs(tree)[0] for _ in range(2))
    assert torch.equal(once, again)
