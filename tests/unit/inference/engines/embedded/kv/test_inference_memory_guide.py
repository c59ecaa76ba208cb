"""The table of memory of a worker in docs/inference.md: each row is computed again from models of
these shapes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from forge.rl import numerics
from services.inference.engines.embedded.kv import attention
from services.inference.engines.embedded.model.architecture import built
from services.inference.engines.embedded.model.policy import Policy

PAGE = Path(__file__).parents[6] / "docs/inference.md"
NARROW = {"hidden_size": 64, "intermediate_size": 16, "vocab_size": 32}
"""Sizes on which keys and values do not depend."""
MODELS: dict[str, tuple[Any, dict[str, int]]] = {
    "Qwen3-0.6B": (
        Qwen3Config,
        {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16}
        | {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072}
        | {"vocab_size": 151936, "tie_word_embeddings": True},
    ),
    "Qwen3-8B": (
        Qwen3Config,
        {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288}
        | {"vocab_size": 151936, "tie_word_embeddings": False},
    ),
    "Llama-3.1-70B": (
        LlamaConfig,
        {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
        | {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 28672}
        | {"vocab_size": 128256, "tie_word_embeddings": False},
    ),
    "Qwen3-30B-A3B": (
        Qwen3MoeConfig,
        {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32}
        | {"num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768}
        | {"num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936}
        | {"tie_word_embeddings": False},
    ),
}


def rows() -> dict[str, list[float]]:
    """The numbers of the table, by model."""
    found = re.findall(
        r"^\| (\S+) \| ([\d.,]+) \| ([\d.,]+) \| ([\d.,]+) \|$", PAGE.read_text(), re.M
    )
    return {name: [float(one.replace(",", "")) for one in numbers] for name, *numbers in found}


def weight_bytes(config: PretrainedConfig) -> int:
    """Bytes of the served weights in bfloat16."""
    attention.register()
    with torch.device("meta"):
        model = built(config, torch.bfloat16)
        numerics.patch(model)
        numerics.store_narrow(model, torch.bfloat16)
    served = {id(one): one for one in model.state_dict(keep_vars=True).values()}
    return sum(one.nbytes for one in served.values())


def narrow_policy(kind: Any, sizes: dict[str, int], folder: Path) -> Policy:
    """The engine's model with keys and values of these sizes, and little else."""
    small = {"moe_intermediate_size": 8} if kind is Qwen3MoeConfig else {}
    kind(**{**sizes, **NARROW, **small}).save_pretrained(folder)
    return Policy.build(str(folder), dtype="bfloat16", device="cpu", context_tokens=64)


@pytest.mark.parametrize(
    "name",
    ["Qwen3-0.6B", *(pytest.param(one, marks=pytest.mark.matrix) for one in list(MODELS)[1:])],
)
def test_table_of_memory_is_that_of_the_models(name: str, tmp_path: Path) -> None:
    """Weights in GiB, keys and values of a token in KiB, experts of a token in bytes."""
    kind, sizes = MODELS[name]
    weights_gib, token_kib, route_bytes = rows()[name]
    assert weight_bytes(kind(**sizes)) / 2**30 == pytest.approx(weights_gib, abs=0.05)
    shape = narrow_policy(kind, sizes, tmp_path).kv_shape
    assert shape.token_bytes / 2**10 == token_kib
    assert shape.route_bytes == route_bytes


def test_table_has_no_model_that_is_not_computed() -> None:
    """A new row needs its sizes here."""
    assert rows().keys() == MODELS.keys()
