"""The fields that requests of OpenAI's two completion APIs share, and their sampling parameters."""

from __future__ import annotations

import msgspec

from forge.v1 import common_pb2
from services.gateway.http.openai.completions.guided import Guided
from services.gateway.http.request_fields.request_body import sampling_params


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None


class CompletionFields(Guided, kw_only=True):
    """The shared fields; a base of request schemas."""

    model: str
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def includes_usage(self) -> bool:
        """A stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(
        self, max_tokens: int | None, *, max_tokens_name: str = "max_tokens"
    ) -> common_pb2.SamplingParams:
        """Returns the sampling parameters; raises `InvalidArgument` out of range."""
        sampling = sampling_params(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            max_tokens_name=max_tokens_name,
        )
        self.write_reshaping(sampling)
        if self.seed is not None:
            sampling.seed = self.seed % 2**64
        return sampling
