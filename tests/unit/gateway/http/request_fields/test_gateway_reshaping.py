"""Penalties, min_p and logit_bias of a request."""

from __future__ import annotations

from typing import Any

import pytest

from forge.core.errors import InvalidArgument
from forge.v1.common_pb2 import SamplingParams
from services.gateway.http.request_fields.reshaping import MAX_BIASES, Reshaping


def written(**fields: Any) -> SamplingParams:
    sampling = SamplingParams()
    Reshaping(**fields).write_reshaping(sampling)
    return sampling


def test_parameters_reach_the_engine() -> None:
    """Ids of logit_bias are texts in JSON."""
    asked: Any = {"min_p": 0.25, "presence_penalty": -2.0, "frequency_penalty": 0.5}
    found = written(repetition_penalty=1.5, logit_bias={"7": -100, "0": 1}, **asked)
    assert found == SamplingParams(repetition_penalty=1.5, logit_bias={7: -100, 0: 1}, **asked)


def test_neutral_values_change_nothing() -> None:
    """Many clients send them with every request."""
    neutral: Any = {"min_p": 0, "presence_penalty": 0, "frequency_penalty": None}
    assert written(repetition_penalty=1, logit_bias={}, **neutral) == SamplingParams()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"min_p": 1.5}, "min_p = 1.5 must be from 0 to 1"),
        ({"presence_penalty": 3}, "presence_penalty = 3 must be from -2 to 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty = nan"),
        ({"repetition_penalty": 0}, "repetition_penalty = 0"),
        ({"logit_bias": {"hello": 1}}, "logit_bias has the key 'hello'"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias has the key '999"),
        ({"logit_bias": {"4": 101}}, r"logit_bias\[4\] = 101"),
        ({"logit_bias": {str(n): 1 for n in range(MAX_BIASES + 1)}}, "has 4097 ids; at most 4096"),
    ],
)
def test_value_out_of_range_is_named(fields: dict[str, Any], says: str) -> None:
    """With its field and the allowed values."""
    with pytest.raises(InvalidArgument, match=says):
        written(**fields)
