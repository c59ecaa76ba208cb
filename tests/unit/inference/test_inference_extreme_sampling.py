"""No accepted sampling parameter makes intact weights look broken: through the codec to the sampler
of the embedded engine."""

from __future__ import annotations

from itertools import product
from math import isfinite, nextafter
from typing import Any

import pytest
import torch

from forge.core.errors import InvalidArgument
from forge.core.sampling_limits import MIN_REPETITION_PENALTY, MIN_TEMPERATURE
from forge.core.token_columns import int32_bytes
from forge.v1.common_pb2 import SamplingParams
from services.inference import codec
from services.inference.engines.base import Prompt
from services.inference.engines.embedded.model.sampler import draw

VOCABULARY = 50
TINY = (1e-45, 1e-38, 1e-30, 1e-7, 1e-6)
EXTREMES: dict[str, tuple[Any, ...]] = {
    "temperature": (*TINY, MIN_TEMPERATURE, 1e-4, 1.0, 100.0),
    "repetition_penalty": (*TINY, MIN_REPETITION_PENALTY, 1.0, 10.0),
    "top_p": (1e-45, 1e-6, 1.0),
    "min_p": (0.0, 1e-45, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "logit_bias": ({}, {3: 100.0, 4: -100.0}),
}


def test_accepted_parameters_give_finite_logprobs() -> None:
    """All combinations of tiny and large values, on logits of usual and of large models."""
    ids = int32_bytes(range(10))
    torch.manual_seed(0)
    logits_RV = torch.randn(2, VOCABULARY) * torch.tensor([[3.0], [300.0]])
    accepted = 0
    for values in product(*EXTREMES.values()):
        params = SamplingParams(max_tokens=4, **dict(zip(EXTREMES, values, strict=True)))
        try:
            sampling = codec.read_sampling(params, seed=1)
        except InvalidArgument:
            continue
        prompt = Prompt(request_id="r", ids=ids, sampling=sampling)
        drawn = draw(
            logits_RV.clone(),
            [prompt] * 2,
            positions=[10, 10],
            matchers=[None, None],
            answers=[(), ()],
        )
        assert all(map(isfinite, drawn.logprobs)), params
        accepted += 1
    assert accepted == 9 * 4 * 3 * 3 * 2 * 2


@pytest.mark.parametrize(
    ("asked", "sampled"),
    [
        (0.0, 0.0),
        (1e-45, 0.0),
        (nextafter(MIN_TEMPERATURE, 0) - 1e-9, 0.0),
        (MIN_TEMPERATURE, MIN_TEMPERATURE),
        (0.5, 0.5),
    ],
)
def test_tiny_temperature_is_greedy(asked: float, sampled: float) -> None:
    """Below the least one; that and larger ones are kept."""
    params = SamplingParams(max_tokens=4, temperature=asked)
    assert codec.read_sampling(params, seed=1).temperature == sampled
