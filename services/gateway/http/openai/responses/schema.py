"""OpenAI Responses requests: schema and checks.

Owns the fields besides the conversation: sampling, echoed fields; `history` decodes the
conversation, `tools` the tools. A known field with a wrong type or an unsupported effect
is refused; unknown ones are named in a header of the response.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Literal

import msgspec

from forge.core.tasks.template_kwargs import kwargs_json
from forge.v1 import common_pb2
from services.gateway.errors import InvalidField
from services.gateway.http.openai.responses.tools import flat_name
from services.gateway.http.request_fields.parameters import add_ignored
from services.gateway.http.request_fields.request_body import place_in
from services.gateway.structured_output.response_format import answer_grammar

MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512

LOGPROBS = "message.output_text.logprobs"

_REFUSED = {
    "background": "each response is made within its request",
    "conversation": "use previous_response_id, or send the items",
    "prompt": "no prompt templates are stored here",
    "context_management": "only agents change contexts",
    "moderation": "there is no moderation here",
}
"""Refused fields, with the reason."""

_ECHOED = (
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "reasoning",
    "store",
    "temperature",
    "text",
    "tool_choice",
    "top_logprobs",
    "top_p",
    "truncation",
)
"""Fields that the response repeats."""


class AnswerFormat(msgspec.Struct):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesRequest(msgspec.Struct):
    """The used fields of a request."""

    model: str
    input: msgspec.Raw = msgspec.field(default_factory=partial(msgspec.Raw, b"null"))
    """A text or items; `history` decodes the new part."""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    store: bool | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    background: Any = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None


def check(request: ResponsesRequest) -> None:
    """Raises `InvalidArgument` for unsupported fields."""
    for name, why in _REFUSED.items():
        if getattr(request, name):
            raise InvalidField(f"{name} is not supported: {why}", param=name)
    if request.truncation not in (None, "disabled"):
        raise InvalidField(
            f"truncation {request.truncation[:40]!r} is not supported: only 'disabled' is",
            param="truncation",
        )
    _check_metadata(request.metadata or {})


async def answer_grammar_of(request: ResponsesRequest) -> common_pb2.Grammar | None:
    """Returns the grammar of `text.format`; raises `InvalidArgument` if not enforceable."""
    given = (request.text or {}).get("format")
    if given is None:
        return None
    try:
        wanted = msgspec.convert(given, AnswerFormat)
    except msgspec.ValidationError as error:
        place = ".".join(filter(None, ("text.format", place_in(str(error)))))
        raise InvalidField(f"text.format is not valid: {error}", param=place) from None
    return await answer_grammar(
        wanted.type, wanted.schema, strict=bool(wanted.strict), field="text.format.schema"
    )


def wanted_tool(request: ResponsesRequest) -> str | None:
    """Returns the required tool; "" for any tool, None if no call is required."""
    choice = request.tool_choice
    if choice is None or choice in ("auto", "none"):
        return None
    if choice == "required":
        return ""
    if isinstance(choice, str):
        raise InvalidField(
            f"tool_choice {choice[:40]!r} is none of 'auto', 'none', 'required' or a function",
            param="tool_choice",
        )
    if choice.get("type") not in ("function", "custom") or not isinstance(choice.get("name"), str):
        raise InvalidField(
            f"tool_choice of type {str(choice.get('type'))[:40]!r} is not supported; "
            "a function or a custom tool with a name is",
            param="tool_choice",
        )
    return flat_name(choice["name"], choice.get("namespace"))


def template_kwargs_of(
    request: ResponsesRequest, variables: Collection[str], headers: dict[str, str]
) -> str:
    """Returns the variables of the chat template. Options without effect are named in `headers`:
    `reasoning.effort` without a variable for it, and `text.verbosity`."""
    kwargs = dict(request.chat_template_kwargs or {})
    effort = (request.reasoning or {}).get("effort")
    if effort is not None:
        if "reasoning_effort" in variables:
            kwargs.setdefault("reasoning_effort", effort)
        else:
            add_ignored(headers, "reasoning.effort")
    if (request.text or {}).get("verbosity") not in (None, "medium"):
        add_ignored(headers, "text.verbosity")
    return kwargs_json(kwargs)


def echoed(request: ResponsesRequest) -> dict[str, Any]:
    """Returns the fields of the request that the response repeats."""
    given = {name: getattr(request, name) for name in _ECHOED}
    return {name: value for name, value in given.items() if value is not None}


def remembered(echoed: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the echoed fields for the turn's record, without the schema, which may be large."""
    kept = dict(echoed)
    form = kept.get("text", {}).get("format")
    if isinstance(form, dict) and "schema" in form:
        kept["text"] = {**kept["text"], "format": {**form, "schema": {}}}
    return kept


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise InvalidField(
            f"metadata has {len(metadata)} pairs; at most {MAX_METADATA}", param="metadata"
        )
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_VALUE_CHARS:
            raise InvalidField(
                f"metadata {key[:MAX_METADATA_KEY_CHARS]!r}: keys have at most "
                f"{MAX_METADATA_KEY_CHARS} characters, values {MAX_METADATA_VALUE_CHARS}",
                param="metadata",
            )
