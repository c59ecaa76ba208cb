"""Parameters that reshape the sampled distribution beyond temperature, top_p and top_k."""

from __future__ import annotations

import msgspec

from forge.core.sampling_limits import MIN_REPETITION_PENALTY
from forge.v1 import common_pb2
from services.gateway.errors import InvalidField
from services.gateway.http.request_fields.request_body import within

MAX_BIASES = 4096
MAX_DIGITS = 10
"""Most digits of a token id."""
MAX_REPETITION_PENALTY = 10.0


class Reshaping(msgspec.Struct, kw_only=True):
    """Parameters that reshape the distribution beyond temperature, top_p and top_k; a base of
    request schemas. Null and OpenAI's neutral values change nothing."""

    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def write_reshaping(self, sampling: common_pb2.SamplingParams) -> None:
        """Sets the parameters; raises `InvalidField` out of range."""
        if self.min_p:
            sampling.min_p = within("min_p", self.min_p, 0, 1)
        if self.presence_penalty:
            sampling.presence_penalty = within("presence_penalty", self.presence_penalty, -2, 2)
        if self.frequency_penalty:
            sampling.frequency_penalty = within("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.repetition_penalty not in (None, 1):
            sampling.repetition_penalty = within(
                "repetition_penalty",
                self.repetition_penalty,
                MIN_REPETITION_PENALTY,
                MAX_REPETITION_PENALTY,
            )
        if len(self.logit_bias or ()) > MAX_BIASES:
            raise InvalidField(
                f"logit_bias has {len(self.logit_bias or ())} ids; at most {MAX_BIASES}",
                param="logit_bias",
            )
        for token, bias in (self.logit_bias or {}).items():
            if not token.isdecimal() or len(token) > MAX_DIGITS or int(token) >= 2**31:
                raise InvalidField(
                    f"logit_bias has the key {token[:40]!r}: it must be a token id",
                    param="logit_bias",
                )
            sampling.logit_bias[int(token)] = within(f"logit_bias[{token}]", bias, -100, 100)
