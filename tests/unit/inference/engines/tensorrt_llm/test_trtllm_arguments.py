"""Tests: settings in the library's terms. What it does not have is refused at the start."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forge.core.errors import ConfigError
from services.inference.engine_settings import TensorRtLlmSettings
from services.inference.engines.model_limits import read_limits
from services.inference.engines.provider import KvStoreOptions
from services.inference.engines.tensorrt_llm.arguments import EXTENSION, Role, engine_arguments
from services.inference.engines.tensorrt_llm.library.surface import TARGET, load_surface
from services.inference.engines.tensorrt_llm.weights import worker_extension
from tests.contract.engines import CONTEXT_TOKENS
from tests.support.inference import tensorrt_llm
from tests.support.inference.tensorrt_llm import OLD, library, options


def arguments(
    model_path: Path, *, role: Role = Role.BOTH, version: str = TARGET, **changed: Any
) -> dict[str, Any]:
    chosen = options(model_path, **changed)
    assert isinstance(chosen.settings, TensorRtLlmSettings)
    limits = read_limits(str(model_path), context_tokens=chosen.context_tokens)
    return engine_arguments(library(version), chosen, chosen.settings, role=role, limits=limits)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"extra": {"tpyo": 1}}, r"engine_options = \{'tpyo': 1\}: .* table tensorrt_llm"),
        ({"device": "cpu"}, "device = 'cpu'"),
        ({"device": "cuda:1"}, "device = 'cuda:1': .* CUDA_VISIBLE_DEVICES"),
        ({"kv_store": KvStoreOptions(directory="/kv", max_bytes=1)}, "kv.store_dir"),
        ({"version": OLD, "role": Role.DECODE}, "role = 'decode' needs tensorrt_llm"),
        ({"version": OLD, "take_hand_offs": True}, "take_hand_offs = true needs tensorrt_llm"),
        ({"version": OLD, "mtp_layers": 1}, "mtp_layers needs tensorrt_llm"),
        (
            {"role": Role.DECODE, "context_tokens": 500, "transfer_tokens": 99},
            "transfer_tokens = 99: prompts have up to context_tokens = 500",
        ),
    ],
)
def test_setting_that_the_engine_lacks_is_refused(
    model_path: Path, changed: dict[str, Any], named: str
) -> None:
    """The error names it with its value."""
    with pytest.raises(ConfigError, match=named):
        arguments(model_path, **changed)


@pytest.mark.parametrize(
    ("role", "changed", "transfers"),
    [
        (Role.PREFILL, {}, True),
        (Role.DECODE, {}, True),
        (Role.BOTH, {}, False),
        (Role.BOTH, {"take_hand_offs": True}, True),
    ],
)
def test_engine_that_transfers_has_a_transceiver(
    model_path: Path, role: Role, changed: dict[str, Any], transfers: bool
) -> None:
    """Its buffer fits the longest prompt; others save its memory."""
    found = arguments(model_path, role=role, **changed).get("cache_transceiver_config")
    assert (found is not None) is transfers
    if found is not None:
        assert (found.backend, found.max_tokens_in_buffer) == ("NIXL", CONTEXT_TOKENS)


def test_prompts_up_to_the_context_are_taken(model_path: Path) -> None:
    """The library's own limit is 1024 tokens; longer passes are cut into chunks."""
    found = arguments(model_path)
    assert (found["max_input_len"], found["max_seq_len"]) == (CONTEXT_TOKENS, CONTEXT_TOKENS)
    assert found["enable_chunked_prefill"]


def test_graphs_that_keep_old_weights_are_refused(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured graphs must see updated weights. 1.2.1 without a setting of its own has none."""
    assert "cuda_graph_config" in arguments(model_path)
    assert "cuda_graph_config" not in arguments(model_path, version=OLD)
    surface = load_surface(TARGET)
    unsafe = replace(surface, behaviours=surface.behaviours - {"updates_fit_cuda_graphs"})
    monkeypatch.setattr(tensorrt_llm, "load_surface", lambda _: unsafe)
    with pytest.raises(ConfigError, match="cuda_graphs = true needs tensorrt_llm"):
        arguments(model_path)
    assert "cuda_graph_config" not in arguments(model_path, cuda_graphs=False)


def test_workers_load_weights_on_one_stream() -> None:
    """The library imports the extension in each worker before it loads the model."""
    assert worker_extension.__name__ in EXTENSION
    assert os.environ["TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL"] == "1"
