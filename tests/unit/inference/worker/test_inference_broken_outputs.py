"""Ids outside the model's vocabulary, as a broken engine samples them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from prometheus_client import REGISTRY

from forge.core.errors import ForgeError
from forge.core.token_columns import int32_bytes
from forge.v1 import common_pb2
from forge.v1 import inference_pb2 as pb
from services.inference.engines.base import Tokens
from services.inference.worker.broken_answers import BrokenOutput
from services.inference.worker.service import PrefillServicer
from tests.support.inference.both_workers import cluster
from tests.support.inference.one_token import OneToken

NAME = "forge_inference_broken_outputs_total"


def refusals() -> float:
    return REGISTRY.get_sample_value(NAME) or 0.0


@pytest.mark.parametrize("token", [100, -1, 2**40])
async def test_prompt_with_a_first_token_outside_the_vocabulary_is_released(token: int) -> None:
    """The error has engine, id and vocabulary; it is counted."""
    engine: Any = OneToken(token=token)
    request = pb.PrefillRequest(request_id="a", prompt_ids=int32_bytes([1, 2]), hold_s=1.0)
    request.sampling.CopyFrom(common_pb2.SamplingParams(max_tokens=4))
    before = refusals()
    expected = re.escape(f"the engine one sampled token {token}; the vocabulary is 0 to 99")
    with pytest.raises(BrokenOutput, match=expected):
        await PrefillServicer(engine).Prefill(request, None)
    assert (engine.released, refusals() - before) == (["a"], 1)


@pytest.mark.parametrize("streams", [False, True], ids=["rpc", "stream"])
@pytest.mark.parametrize("announces", [False, True], ids=["two calls", "one call"])
async def test_answer_ends_at_an_id_outside_the_vocabulary(
    announces: bool, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other worker continues it, and nothing of it is held."""
    async with cluster(announces=announces, streams=streams) as served:
        engine, sound = served.engine, served.engine._tokens

        def broken(*ids: int) -> Tokens:
            return sound(*(token if token < 6 else engine.limits.vocabulary for token in ids))

        monkeypatch.setattr(engine, "_tokens", broken)
        with pytest.raises(ForgeError, match="sampled token") as error:
            await served.answer()
        assert type(error.value) is ForgeError
        assert engine.calls == ["prefill", "decode"]
        assert await served.is_idle()
