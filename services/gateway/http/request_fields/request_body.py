"""Decoding and checks for the request bodies of all protocols.

Owns JSON decoding, the repair of half characters, and the limits of sampling parameters and stop
strings. Owns no fields: they are in `anthropic`, `openai` and `control`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from forge.core.formats import OutputFormat
from forge.core.sampling_limits import effective_temperature
from forge.v1 import common_pb2
from services.gateway.errors import InvalidField
from services.gateway.metrics import REPLACED_SURROGATES
from services.gateway.model.chat_model import Tools

MAX_STOPS = 16
MAX_STOP_CHARS = 65_536
"""Most characters of all stop strings of a request; the answer is searched for each after every
token."""
MAX_STOP_IDS = 128
MAX_TOP_LOGPROBS = 20
Request = TypeVar("Request")

_REPLACEMENT = rb"\ufffd"
_SURROGATES = re.compile(
    # An even number of backslashes before an escape belongs to the text.
    rb"(?<!\\)(?:\\\\)*\\u[dD](?:"
    rb"(?P<pair>[89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|[89a-fA-F][0-9a-fA-F]{2})"
)
"""Matches the escapes of surrogates in JSON bytes."""
_PLACE = re.compile(r"`\$\.?([^`]*)`$")
_NAMED = re.compile(r"Object (?:missing required|contains unknown) field `([^`]*)`")
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions of msgspec for JSON that it cannot decode."""


def decode(body: bytes, kind: type[Request]) -> Request:
    """Decodes a request body; raises `InvalidField` with the place of the error."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except UNREADABLE as error:
        raise wrong_json(str(error)) from None


def wrong_json(wrong: str, *, within: str = "") -> InvalidField:
    """Returns the error for JSON that msgspec refuses with the text `wrong`. `within`: the place of
    the decoded part in the body."""
    if within:
        wrong, found = re.subn(r"`\$", f"`$.{within}", wrong)
        wrong = wrong if found else f"{wrong} - at `$.{within}`"
    return InvalidField(f"the request body is not valid: {wrong}", param=place_in(wrong))


def place_in(wrong: str) -> str:
    """Returns the place of the wrong field in an error of msgspec; "" without one."""
    matches = (_PLACE.search(wrong), _NAMED.match(wrong))
    return ".".join(match[1] for match in matches if match and match[1])


def without_lone_surrogates(body: bytes) -> bytes:
    """Replaces the escape of each lone surrogate in a JSON text by U+FFFD, and counts it.

    A program that cuts a text between the halves of a character, as JavaScript's `slice` may, sends
    half a surrogate pair. JSON readers replace it; no tokenizer can encode it.
    """
    if b"\\ud" not in body and b"\\uD" not in body:
        return body
    lone = [match.end() for match in _SURROGATES.finditer(body) if match["pair"] is None]
    if not lone:
        return body
    REPLACED_SURROGATES.inc(len(lone))
    replaced = bytearray(body)
    for end in lone:
        replaced[end - len(_REPLACEMENT) : end] = _REPLACEMENT
    return bytes(replaced)


def tool_to_call(wanted: str, tools: Tools, output: OutputFormat) -> str:
    """Returns the tool that the answer must call, "" for any of several tools.

    `wanted`: the requested name, or "" for any tool. Raises `InvalidField` if no call is possible.
    """
    names = [tool["function"]["name"] for tool in tools]
    if not names:
        raise InvalidField(
            "tool_choice requires a call, but the request has no tools", param="tool_choice"
        )
    if not output.takes_tools:
        raise InvalidField(
            f"tool_choice is not supported: the model's format ({output.name}) has no tool calls",
            param="tool_choice",
        )
    if not wanted:
        return names[0] if len(names) == 1 else ""
    if wanted not in names:
        raise InvalidField(f"tool_choice names {wanted!r}; tools are {names}", param="tool_choice")
    return wanted


def top_logprobs_of(requested: int | None) -> int:
    """Returns the number of likeliest tokens; raises `InvalidField` above the limit."""
    return int(within("top_logprobs", requested or 0, 0, MAX_TOP_LOGPROBS))


def sampling_params(
    *,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None = None,
    min_tokens: int | None = None,
    stop_token_ids: Sequence[int] | None = None,
    max_tokens_name: str = "max_tokens",
) -> common_pb2.SamplingParams:
    """Returns the sampling parameters of all protocols; raises `InvalidField` out of range."""
    if max_tokens is not None:
        within(max_tokens_name, max_tokens, 1, 2**31 - 1)
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens or 0)
    if temperature is not None:
        sampling.temperature = effective_temperature(within("temperature", temperature, 0, 100))
    if top_p is not None:
        sampling.top_p = within("top_p", top_p, 1e-6, 1)
    if top_k is not None:
        # Some clients send -1 for "all".
        sampling.top_k = int(max(0, within("top_k", top_k, -1, 2**31 - 1)))
    if min_tokens:
        limit = 2**31 - 1 if max_tokens is None else max_tokens
        sampling.min_tokens = int(within("min_tokens", min_tokens, 0, limit))
    if stop_token_ids:
        if len(stop_token_ids) > MAX_STOP_IDS:
            count = len(stop_token_ids)
            raise InvalidField(
                f"stop_token_ids has {count} ids; at most {MAX_STOP_IDS}", param="stop_token_ids"
            )
        for at, token in enumerate(stop_token_ids):
            within(f"stop_token_ids[{at}]", token, 0, 2**31 - 1)
        sampling.stop_token_ids.extend(stop_token_ids)
    return sampling


def checked_stops(name: str, given: str | list[str] | None) -> list[str]:
    """Returns the stop strings; raises `InvalidField` for too many or too long ones."""
    stops = [given] if isinstance(given, str) else given or []
    if len(stops) > MAX_STOPS:
        raise InvalidField(f"{name} has {len(stops)} strings; at most {MAX_STOPS}", param=name)
    if (chars := sum(map(len, stops))) > MAX_STOP_CHARS:
        raise InvalidField(f"{name} has {chars} characters; at most {MAX_STOP_CHARS}", param=name)
    return stops


def within(name: str, value: float, low: float, high: float) -> float:
    """Returns `value`; raises `InvalidField` out of range."""
    # In this form NaN is refused too.
    if not low <= value <= high:
        # An integer may be beyond any float.
        shown = f"{value!r:.40}" if isinstance(value, int) else f"{value:.10g}"
        raise InvalidField(f"{name} = {shown} must be from {low:g} to {high:.10g}", param=name)
    return value
