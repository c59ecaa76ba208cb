"""The columns of an answer whose workers got different parameters: the rest of a request asks for
less than the request; and its end, which a lost worker may not have sent."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from forge.core.token_columns import int32_bytes
from forge.v1 import inference_pb2 as pb
from forge.v1.common_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    SampledTokens,
    SamplingParams,
)
from services.inference import codec
from services.inference.engines.base import ModelLimits, Tokens
from services.inference.router.fleet.fleet import SUSPECT_S
from services.inference.router.fleet.workers import Engine
from services.inference.router.metrics import STARTED_OVER
from services.inference.router.request.answer import RoutedAnswer
from tests.support.inference.both_workers import cluster
from tests.support.runtime.waiting import until

LIMITS = ModelLimits(context_tokens=100, vocabulary=1000)
ENGINE = Engine(role="both")


def answer_of(**sampling: object) -> RoutedAnswer:
    params = SamplingParams(max_tokens=9, **sampling)  # type: ignore[arg-type]
    request = pb.SampleRequest(request_id="r", prompt_ids=int32_bytes([1, 2]), sampling=params)
    prompt = codec.read_prompt(request, LIMITS, seed=1)
    return RoutedAnswer(request, prompt, context_tokens=LIMITS.context_tokens)


def sampled(answer: RoutedAnswer, *ids: int) -> SampledTokens:
    """Tokens of a worker that has the rest of the request, with the columns of engines."""
    sampling = codec.read_sampling(answer.rest(), seed=1)
    count = len(ids)
    return codec.write_tokens(
        Tokens(
            ids=ids,
            logprobs=(-0.5,) * count,
            versions=(1,) * count,
            allowed=(-0.25,) * count if sampling.reshapes else (),
        )
    )


def test_answer_that_starts_over_counts_once() -> None:
    """With the first token of another engine: attempts there that fail before count nothing."""
    answer, other = answer_of(), replace(ENGINE, model="other")
    answer.take(sampled(answer, 4), replace(ENGINE, model="one"))
    counted = STARTED_OVER.labels("model")
    before = counted._value.get()
    for _ in range(3):
        assert answer.needs.change_by(other) == "model"
    assert counted._value.get() == before
    for token in (5, 6):
        answer.take(sampled(answer, token), other)
    assert counted._value.get() == before + 1


@pytest.mark.parametrize("streamed", [False, True])
def test_moved_answer_has_a_share_for_each_token(streamed: bool) -> None:
    """The worker that continues behind `min_tokens` gets none, and returns no shares: its tokens
    may be any, so their share is 1."""
    answer = answer_of(min_tokens=3, stop_token_ids=[9])
    messages = []
    for ids in ((4, 5), (6, 7), (8,)):
        answer.take(sampled(answer, *ids), ENGINE)
        messages += answer.flush() if streamed else []
    found = [codec.read_tokens(one) for one in messages or answer.flush()]
    assert [share for one in found for share in one.allowed] == [-0.25] * 4 + [0.0]


def test_answer_that_nothing_reshapes_has_no_shares() -> None:
    """Nor an empty message, as recorded experts come in."""
    answer = answer_of()
    answer.take(sampled(answer, 4, 5), ENGINE)
    answer.take(SampledTokens(), ENGINE)
    assert [codec.read_tokens(one).allowed for one in answer.flush()] == [()]


@pytest.mark.parametrize(
    ("sampling", "finish"),
    [
        ({"max_tokens": 5}, FINISH_REASON_LENGTH),
        ({"max_tokens": 12, "stop_token_ids": [8]}, FINISH_REASON_STOP),
    ],
)
@pytest.mark.parametrize("streams", [False, True], ids=["rpc", "stream"])
async def test_answer_whose_worker_is_lost_before_its_finish_reason_has_ended(
    sampling: dict[str, Any], finish: int, streams: bool
) -> None:
    """An engine may send the last token before its finish reason: no other worker samples behind
    it."""
    async with cluster(streams=streams) as served:
        served.engine.waits_after = 4
        call = asyncio.create_task(served.answer(**sampling))
        await until(lambda: served.taken() == [5])
        served.networks[0].cut_all()
        await until(lambda: served.harness.workers[0].suspect_until_s > 0)
        served.engine.goes_on.set()
        served.harness.clock.now_s += 2 * SUSPECT_S
        assert await call == ([4, 5, 6, 7, 8], finish)
        assert served.engine.calls == ["prefill", "decode"]
        await until(served.is_idle)
