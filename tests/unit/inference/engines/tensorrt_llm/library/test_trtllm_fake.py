"""Tests: the stand-in has the surface of the library, and refuses what the library gets wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.inference.engines.tensorrt_llm.library.surface import TARGET, load_surface
from services.inference.engines.tensorrt_llm.library.surface_diff import Tree, compare
from services.inference.engines.tensorrt_llm.weights.worker_extension import WorkerExtension
from tests.contract import engines
from tests.support.inference.tensorrt_llm import install_stand_in
from tests.support.inference.tensorrt_llm_fake._torch.async_llm import AsyncLLM
from tests.support.inference.tensorrt_llm_fake.behaviour import Behaviour, Misuse, behaving
from tests.support.inference.tensorrt_llm_fake.disaggregated_params import DisaggregatedParams
from tests.support.inference.tensorrt_llm_fake.llmapi.llm_args import (
    CacheTransceiverConfig,
    KvCacheConfig,
)
from tests.support.inference.tensorrt_llm_fake.sampling_params import SamplingParams

_EXTENSION = "services.inference.engines.tensorrt_llm.weights.worker_extension.WorkerExtension"


def test_stand_in_has_the_surface_of_the_library(tmp_path: Path) -> None:
    """The tool that compares an installed library finds no difference in the stand-in."""
    root = install_stand_in(tmp_path) / "tensorrt_llm"
    assert compare(Tree(root), load_surface(TARGET))[0] == []


async def start(tmp_path: Path, **arguments: Any) -> AsyncLLM:
    engines.CONFIGS["llama"].save_pretrained(tmp_path)
    defaults: dict[str, Any] = {
        "model": str(tmp_path),
        "kv_cache_config": KvCacheConfig(tokens_per_block=8),
        "ray_worker_extension_cls": _EXTENSION,
    }
    return await AsyncLLM(**(defaults | arguments))


def params(**arguments: Any) -> SamplingParams:
    return SamplingParams(**({"end_id": -1, "detokenize": False, "seed": 0} | arguments))


def test_unknown_argument_is_refused(tmp_path: Path) -> None:
    """As the library's pydantic models do."""
    with pytest.raises(ValueError, match="not permitted"):
        AsyncLLM(model=str(tmp_path), kv_cache="large")


@pytest.mark.parametrize("wrong", [{"top_k": -1}, {"temperature": 0.0}, {"seed": -1}])
def test_value_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    """-1 is no top_k, and 0 no temperature."""
    with pytest.raises(ValueError, match=r"top_k|temperature|seed"):
        SamplingParams(**wrong)


async def test_parameters_serve_one_request(tmp_path: Path) -> None:
    """A prefill changes max_tokens on the object, so a second use is a misuse."""
    behaviour = Behaviour()
    with pytest.raises(AssertionError, match="serves two requests"), behaving(behaviour):
        transceiver = CacheTransceiverConfig(backend="NIXL", max_tokens_in_buffer=64)
        llm = await start(
            tmp_path, cache_transceiver_config=transceiver, disable_overlap_scheduler=True
        )
        shared = params(max_tokens=9)
        hand_off = DisaggregatedParams(request_type="context_only", disagg_request_id=7)
        await llm.generate_async([1, 2], shared, disaggregated_params=hand_off)
        assert shared.max_tokens == 1
        with pytest.raises(Misuse):
            llm.generate_async([1, 2], shared)
        llm.shutdown()


async def test_extension_with_a_name_of_the_worker_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a private one: ours has its methods for collective calls alone."""
    ours = [name for name in dir(WorkerExtension) if not name.startswith("__")]
    steps = {"begin_forge_update", "finish_forge_update", "abort_forge_update"}
    of_buckets = {"check_forge_bucket", "load_forge_bucket"}
    assert {*ours} == {*steps, *of_buckets, "wait_for_engine_idle"}
    monkeypatch.setattr(WorkerExtension, "_handle_background_error", None, raising=False)
    with pytest.raises(ValueError, match="already defines '_handle_background_error'"):
        await start(tmp_path)


async def test_paused_engine_refuses_requests(tmp_path: Path) -> None:
    """Until it is resumed; those that ran are cancelled."""
    with behaving(Behaviour()):
        llm = await start(tmp_path)
        running = llm.generate_async([1, 2], params(max_tokens=400))
        await llm.pause_generation()
        assert (await running).outputs[0].finish_reason == "cancelled"
        with pytest.raises(RuntimeError, match="paused"):
            llm.generate_async([1, 2], params())
        await llm.resume_generation()
        assert len((await llm.generate_async([1], params(max_tokens=3))).outputs[0].token_ids) == 3
        llm.shutdown()


async def test_old_version_has_no_pause_and_no_salt(tmp_path: Path) -> None:
    """1.2.1 rejects what came later."""
    with behaving(Behaviour(is_old=True)):
        llm = await start(tmp_path)
        with pytest.raises(AttributeError):
            await llm.pause_generation()
        with pytest.raises(TypeError, match="cache_salt"):
            llm.generate_async([1, 2], params(), cache_salt="1")
        llm.shutdown()


async def test_logprobs_are_found_by_token_alone(tmp_path: Path) -> None:
    """The first entry is the likeliest token, the sampled one stands last."""
    with behaving(Behaviour()):
        llm = await start(tmp_path)
        sampled = params(max_tokens=20, temperature=2.0, logprobs=2)
        output = (await llm.generate_async([1, 2], sampled)).outputs[0]
        entries = zip(output.token_ids, output.logprobs, strict=True)
        assert any(next(iter(entry)) != token for token, entry in entries)
        llm.shutdown()
