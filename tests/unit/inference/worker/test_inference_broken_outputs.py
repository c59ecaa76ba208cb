"""Ids outside the model's vocabulary, as a broken engine samples them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from forge.core.errors import ForgeError, InvalidArgument
from forge.core.token_columns import int32_bytes
from forge.runtime.rpc.channel import Channels
from forge.v1 import common_pb2
from forge.v1 import inference_pb2 as pb
from services.inference import codec
from services.inference.engines.base import Tokens
from services.inference.worker.broken_answers import BrokenOutput
from services.inference.worker.service import DecodeServicer, PrefillServicer
from tests.support.inference.both_workers import cluster
from tests.support.inference.one_token import OneToken
from tests.support.inference.weight_sources import SECURITY

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


async def test_likeliest_token_outside_the_vocabulary_is_refused() -> None:
    """As a sampled one; the error says that it is one of `top_logprobs`."""
    engine: Any = OneToken(top=(((4, -1.0), (100, -2.0)),))
    engine.capabilities = replace(engine.capabilities, top_logprobs=2)
    request = pb.PrefillRequest(request_id="a", prompt_ids=int32_bytes([1, 2]), hold_s=1.0)
    request.sampling.CopyFrom(common_pb2.SamplingParams(max_tokens=4, top_logprobs=2))
    before = refusals()
    expected = "engine one returned top_logprobs of token 100; the vocabulary is 0 to 99"
    with pytest.raises(BrokenOutput, match=expected):
        await PrefillServicer(engine).Prefill(request, None)
    assert (engine.released, refusals() - before) == (["a"], 1)


@pytest.mark.parametrize(
    ("field", "first"),
    [
        ("token 100", Tokens(ids=(100,), logprobs=(-1.0,), versions=(1,))),
        ("token -1", Tokens(ids=(-1,), logprobs=(-1.0,), versions=(1,))),
        ("token 100", Tokens(ids=(4,), logprobs=(-1.0,), versions=(1,), top=(((100, -1.0),),))),
    ],
    ids=["high", "negative", "likeliest"],
)
async def test_decode_refuses_a_first_token_outside_the_vocabulary(
    field: str, first: Tokens
) -> None:
    """Before the engine gets it."""
    engine: Any = OneToken()
    request = pb.DecodeRequest(
        request_id="a", prompt_ids=int32_bytes([1, 2]), first=codec.write_tokens(first)
    )
    request.sampling.CopyFrom(common_pb2.SamplingParams(max_tokens=4))
    servicer = DecodeServicer(engine, Channels(SECURITY), silence_s=1.0)
    with pytest.raises(InvalidArgument, match=f"first has {field}; the vocabulary is 0 to 99"):
        await anext(servicer.answer(request))


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
