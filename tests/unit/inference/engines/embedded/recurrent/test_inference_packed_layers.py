"""Several sequences of recurrent layers in one pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.support.inference.model_families import families
from forge.rl.model.probe import randomize
from forge.rl.model.small_config import small_config
from services.inference.engines.embedded.kv.fitting import Recorder
from services.inference.engines.embedded.model import packed_linears
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.recurrent import packed
from services.inference.engines.embedded.recurrent.packed import Piece
from services.inference.engines.tensor_bytes import to_named

_CONFIGS = {one.model_type: one.config for one in families()}
_LENGTHS = (9, 1, 17)
_MOST_ERROR = {"float32": 1e-3, "bfloat16": 1e-5}
"""Of logits. In bfloat16 scans are float64, and only the head's sums have another order."""


def _policy(family: str, dtype: str, directory: Path) -> Policy:
    """A small model whose layers are all recurrent, with random weights."""
    torch.manual_seed(0)
    config = small_config(_CONFIGS[family]())
    config.save_pretrained(directory)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model)
    tensors = {name: to_named(name, one) for name, one in model.state_dict().items()}
    policy = Policy.build(str(directory), dtype=dtype, device="cpu")
    policy.swap(policy.stage(tensors, version=1))
    return policy


@torch.inference_mode()
def _run(policy: Policy, ids: torch.Tensor, pieces: list[Piece]) -> torch.Tensor:
    positions = torch.arange(len(ids))
    return policy.forward(ids, positions, Recorder(), recurrent=pieces)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_sequences_of_one_pass_are_computed_as_each_alone(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over several sequences, one of them in two pieces and one that resumes after the first
    piece of another, has the logits and leaves the states of a pass over each."""
    monkeypatch.setattr(packed_linears, "_LEAST_NARROW", 1)
    policy = _policy(family, dtype, tmp_path)
    shape = policy.kv_shape.states
    assert shape is not None
    ids = [torch.randint(0, 60, (length,)) for length in _LENGTHS]
    alone, states = [], []
    for own in ids:
        states.append(shape.zeros(1, policy.device))
        pieces = [Piece(place=slice(0, len(own)), row_1S=states[-1])]
        alone.append(_run(policy, own, pieces))
    rows = shape.zeros(4, policy.device).split(1)
    kept = shape.zeros(1, policy.device)
    packed = [
        Piece(place=slice(0, 4), row_1S=rows[0], keep_1S=kept),
        Piece(place=slice(4, 9), row_1S=rows[0]),
        Piece(place=slice(9, 10), row_1S=rows[1]),
        Piece(place=slice(10, 27), row_1S=rows[2]),
        Piece(place=slice(27, 32), row_1S=rows[3], begin_1S=kept),
    ]
    logits = _run(policy, torch.cat([*ids, ids[0][4:]]), packed)
    wanted = torch.cat([*alone, alone[0][4:]])
    error = _MOST_ERROR[dtype]
    torch.testing.assert_close(logits, wanted, rtol=error, atol=error)
    for row, state in zip(rows, (*states, states[0]), strict=True):
        for layer in range(2):
            found, expected = (shape.of_layer(layer, one) for one in (row, state))
            for key, value in found.items():
                torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kernels", [False, True])
def test_short_piece_takes_a_short_chunk_unless_a_kernel_computes_it(
    device: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any device transformers' own scans pad each piece to whole chunks of 256 tokens; `meta`
    stands in for a GPU."""
    monkeypatch.setattr(packed, "_has_kernels", lambda: kernels)
    chunks = []
    for tokens in (9, 40, 512):
        part = {"hidden_states": torch.empty(1, tokens, device=device), "chunk_size": 256}
        packed._fit_chunk(part, 0, tokens)
        chunks.append(part["chunk_size"])
    whole = kernels and device != "cpu"
    assert chunks == ([256, 256, 256] if whole else [16, 64, 256])
