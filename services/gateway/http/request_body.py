"""What the request bodies of all protocols have in common: JSON, sampling, stop strings, limits.

Owns no protocol: `anthropic` and `openai` have the fields, and `control` has those of a close.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from forge.core.errors import InvalidArgument
from forge.core.formats import OutputFormat
from forge.v1 import common_pb2
from services.gateway.model.chat_model import Tools

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
Request = TypeVar("Request")


def decode(body: bytes, kind: type[Request]) -> Request:
    """A request body as `kind`; raises `InvalidArgument` saying where it is wrong."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"the request body is not valid: {error}") from None


def tool_to_call(wanted: str, tools: Tools, output: OutputFormat) -> str:
    """The tool that an answer must call, "" for any of several; `wanted` is its name or "".

    Raises `InvalidArgument` if it cannot be had.
    """
    names = [tool["function"]["name"] for tool in tools]
    if not names:
        raise InvalidArgument("tool_choice asks for a call, but there are no tools")
    if not output.takes_tools:
        raise InvalidArgument(
            f"tool_choice cannot be had: the model's output format ({output.name}) knows no tools"
        )
    if not wanted:
        return names[0] if len(names) == 1 else ""
    if wanted not in names:
        raise InvalidArgument(f"tool_choice names {wanted!r}; tools are {names}")
    return wanted


def top_logprobs_of(asked: int | None) -> int:
    """How many of the likeliest tokens; raises `InvalidArgument` for more than there may be."""
    return int(within("top_logprobs", asked or 0, 0, MAX_TOP_LOGPROBS))


def sampling_params(
    *,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None = None,
    max_tokens_name: str = "max_tokens",
) -> common_pb2.SamplingParams:
    """What all protocols let an agent say; raises `InvalidArgument` for what is out of range."""
    if max_tokens is not None:
        within(max_tokens_name, max_tokens, 1, 2**31 - 1)
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens or 0)
    if temperature is not None:
        sampling.temperature = within("temperature", temperature, 0, 100)
    if top_p is not None:
        sampling.top_p = within("top_p", top_p, 1e-6, 1)
    if top_k is not None:
        # -1 is how some clients say "all".
        sampling.top_k = int(max(0, within("top_k", top_k, -1, 2**31 - 1)))
    return sampling


def checked_stops(name: str, stops: list[str]) -> list[str]:
    if len(stops) > MAX_STOPS:
        raise InvalidArgument(f"{name} has {len(stops)} strings; at most {MAX_STOPS}")
    return stops


def within(name: str, value: float, low: float, high: float) -> float:
    # Written so that NaN is refused too.
    if not low <= value <= high:
        raise InvalidArgument(f"{name} = {value:.10g} must be from {low:g} to {high:.10g}")
    return value
