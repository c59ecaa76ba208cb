"""A hand-off from a worker whose recurrent states have another type."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from transformers import AutoModelForCausalLM

from benchmarks.support.inference.model_families import families
from forge.rl.model.probe import randomize
from forge.rl.model.small_config import small_config
from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.base import KvSpan, Prompt, RefusedHandOff, Sampling
from services.inference.engines.embedded.engine import EmbeddedDecode, EmbeddedPrefill
from services.inference.engines.embedded.recurrent import layers
from services.inference.engines.embedded.recurrent.shape import Key, StateShape
from services.inference.engines.provider import EngineOptions
from services.inference.engines.tensor_bytes import to_named

_CONFIGS = {one.model_type: one.config for one in families()}
_ANSWER = 4
_SAMPLING = Sampling(
    temperature=1.0, top_p=1.0, top_k=0, max_tokens=_ANSWER, stop_ids=frozenset(), seed=1
)


def _narrow_shape(states: Mapping[Key, torch.Tensor]) -> StateShape:
    """As of releases with states in float32."""
    narrow = {
        key: one.float() if one.dtype == torch.float64 else one for key, one in states.items()
    }
    assert any(one.dtype == torch.float64 for one in states.values())
    return StateShape(narrow)


def _refused() -> float:
    name = "forge_inference_hand_offs_refused_total"
    return REGISTRY.get_sample_value(name, {"reason": "model"}) or 0.0


async def _answered(prefill: EmbeddedPrefill, decode: EmbeddedDecode) -> int:
    """Tokens of an answer by both."""
    ids = array("i", range(5, 15)).tobytes()
    prompt = Prompt(request_id="r", ids=ids, sampling=_SAMPLING)
    first = (await prefill.prefill(prompt, hold_s=60.0)).first

    async def fetch(from_token: int) -> KvSpan:
        return await prefill.fetch_kv(prompt.request_id, from_token=from_token)

    try:
        pieces = [one async for one in decode.decode(prompt, first, fetch, stream=False)]
    finally:
        prefill.release(prompt.request_id)
    return len(first.ids) + sum(len(one.tokens.ids) for one in pieces)


async def test_states_of_another_type_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between releases: counted, and before anything is used. The only place of the worker is
    free again, so the prompt that another worker computes is answered."""
    torch.manual_seed(0)
    config = small_config(_CONFIGS["qwen3_next"]())
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model)
    tensors = {name: to_named(name, one.bfloat16()) for name, one in model.state_dict().items()}
    options = EngineOptions(
        model_path=str(tmp_path),
        dtype="bfloat16",
        block_tokens=4,
        max_running=1,
        request_timeout_s=60.0,
    )
    engines = list[Any]()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(layers, "StateShape", _narrow_shape)
            engines.append(await EmbeddedPrefill.start(ActorSystem("states"), options))
        engines.append(await EmbeddedPrefill.start(ActorSystem("states"), options))
        engines.append(await EmbeddedDecode.start(ActorSystem("states"), options))
        for engine in engines:
            await engine.load(tensors, version=1)
        earlier, prefill, decode = engines
        before = _refused()
        for _ in range(2):
            with pytest.raises(RefusedHandOff, match="another model"):
                await _answered(earlier, decode)
        assert _refused() == before + 2
        assert await _answered(prefill, decode) == _ANSWER
    finally:
        for engine in engines:
            await engine.close()
