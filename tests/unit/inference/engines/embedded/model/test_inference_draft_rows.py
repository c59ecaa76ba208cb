"""Draft heads over a part of the vocabulary: the logits of the whole, of the served weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    PhiConfig,
    PretrainedConfig,
)

from forge.rl.mtp.heads import MtpHeads
from forge.rl.sampling import TokenSubset
from services.inference.engines.embedded.model import packed_linears
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.tensor_bytes import to_named

VOCABULARY, CHANNELS = 97, 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": CHANNELS,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "plain": LlamaConfig(**SHAPE),
    "tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "biased": PhiConfig(**SHAPE),
    "soft-capped": Gemma2Config(**SHAPE, head_dim=16, final_logit_softcapping=0.5),
}
AMONG = TokenSubset(torch.arange(1, VOCABULARY, 3), vocabulary=VOCABULARY)
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1}


def load(policy: Policy, config: PretrainedConfig, *, version: int) -> None:
    """Serve random weights with random heads."""
    torch.manual_seed(version)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    heads = MtpHeads(2, channels=CHANNELS, embedding_channels=CHANNELS)
    tensors = {**model.state_dict(), **heads.named_tensors()}
    for name, one in tensors.items():
        if name.endswith("head.bias"):
            torch.nn.init.normal_(one)
    named = {name: to_named(name, one) for name, one in tensors.items()}
    policy.swap(policy.stage(named, version=version))


@torch.inference_mode()
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("which", CONFIGS)
def test_part_of_the_vocabulary_has_the_logits_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, dtype: str, packs: bool
) -> None:
    """With a bias, a cap and packed matrices, for one row and several; after a swap those of the
    new weights, also where the part stays."""
    if packs:
        monkeypatch.setattr(packed_linears, "_LEAST_NARROW", 1)
        monkeypatch.setattr(packed_linears, "_LEAST_WIDE", 1)
    CONFIGS[which].save_pretrained(tmp_path)
    policy = Policy.build(str(tmp_path), dtype=dtype, device="cpu", draft_tokens=2)
    for version in (1, 2):
        load(policy, CONFIGS[which], version=version)
        assert policy.drafts is not None
        for rows in (1, 5):
            ids_R = torch.randint(VOCABULARY, (rows,))
            states_RC = torch.randn(rows, CHANNELS).to(policy.dtype)
            for number in range(2):
                _, whole_RV = policy.drafts.draft(number, states_RC, ids_R)
                _, part_RS = policy.drafts.draft(number, states_RC, ids_R, AMONG)
                expected_RS = whole_RV[:, AMONG.tokens_S]
                scale = float(expected_RS.abs().max())
                assert torch.allclose(part_RS, expected_RS, atol=TOLERANCES[dtype] * scale)


def test_packed_heads_have_no_plain_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is that of the packed matrices."""
    monkeypatch.setattr(packed_linears, "_LEAST_WIDE", 1)
    CONFIGS["plain"].save_pretrained(tmp_path)
    policy = Policy.build(str(tmp_path), dtype="float32", device="cpu", draft_tokens=2)
    load(policy, CONFIGS["plain"], version=1)
    assert policy.drafts is not None
    matrices = [one for one in policy.drafts.tensors() if one.dim() == 2]
    assert all(one.untyped_storage().nbytes() == 4 for one in matrices)
