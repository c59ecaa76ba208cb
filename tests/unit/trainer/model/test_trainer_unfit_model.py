"""A model directory that cannot be loaded is one line with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import OPTConfig, OPTForCausalLM

from forge.core.errors import ConfigError, InvalidArgument
from services.inference.engines.embedded.model.architecture import read_config
from services.trainer.model.full_weights import check_family, load_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shape = OPTConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    shape.ffn_dim = shape.word_embed_proj_dim = 8
    OPTForCausalLM(shape).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("content", [b"no weights here", None])
def test_damaged_weights_name_the_remedy(model: Path, content: bytes | None) -> None:
    """A file of other content, and a copy that ended early."""
    file = model / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(content or whole[: len(whole) // 2])
    with pytest.raises(InvalidArgument, match="damaged or incomplete, copy it again") as caught:
        load_model(model)
    assert str(caught.value).startswith(f"model_path = {str(model)!r}: ")


def test_type_that_torch_does_not_have_is_named(model: Path) -> None:
    """By the trainer, and by the engine."""
    file = model / "config.json"
    file.write_text(file.read_text().replace('"float32"', '"float7"'))
    with pytest.raises(ConfigError, match="no attribute 'float7'"):
        check_family(str(model))
    with pytest.raises(InvalidArgument, match="no attribute 'float7'"):
        read_config(str(model))
