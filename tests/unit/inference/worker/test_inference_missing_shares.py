"""Tokens of engines that do not compute the share of a mask."""

from __future__ import annotations

import math
from typing import Any

import pytest

from forge.core.token_columns import float32_array, int32_bytes
from forge.v1 import common_pb2
from forge.v1 import inference_pb2 as pb
from services.inference.worker.service import PrefillServicer
from tests.support.inference.one_token import OneToken


@pytest.mark.parametrize(
    ("shares", "min_tokens", "expected"), [(True, 2, -0.5), (False, 2, math.nan), (False, 0, None)]
)
async def test_missing_share_is_recorded_as_missing(
    shares: bool, min_tokens: int, expected: float | None
) -> None:
    """Nothing, as of a request without a mask, would be trained without its correction."""
    engine: Any = OneToken(shares=shares)
    request = pb.PrefillRequest(request_id="a", prompt_ids=int32_bytes([1, 2]), hold_s=1.0)
    request.sampling.CopyFrom(
        common_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=4, min_tokens=min_tokens)
    )
    request.sampling.stop_token_ids.append(3)
    answer = await PrefillServicer(engine).Prefill(request, None)
    found = float32_array(answer.first.allowed_logprobs).tolist()
    assert found == pytest.approx([] if expected is None else [expected], nan_ok=True)
