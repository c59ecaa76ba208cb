"""The opening of an answer: the beginning of a required call, or the text that an agent prefills.

An opening is part of the prompt. A required call's ends where the tokenizer ends a token in every
call that may follow. Otherwise the model would continue token boundaries that it never saw in
training: where `": {"` is one token, the text before the brace must not be in the prompt. The
turn's grammar forces the rest of the beginning. Owns no grammar.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from forge.core.formats import CallDelta
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.model.chat_model import ChatModel
from services.gateway.model.chat_template import ASKED

KEPT_OPENINGS = 256
MAX_CALLS = 128
"""Most sample calls of one opening: of more tools and arguments, the first ones are tried."""
_SAMPLES: dict[str, Any] = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}
"""A value by type of a schema; others are texts."""


def opening_of(model: ChatModel, request: TurnRequest) -> str:
    """Returns the end of the prompt that begins the answer; "" if nothing is forced.

    Raises `InvalidArgument` for a required call of a model without calls.
    """
    closing = ""
    if model.reasoning is not None:
        # If the template opens the reasoning, the reasoning must end before the opening.
        template = model.template_with(request.template_kwargs)
        closing = model.reasoning.closing if template.opens_reasoning else ""
    if request.required_tool is None:
        return closing + request.prefill if request.prefill else ""
    tools = [tool["function"] for tool in request.tools]
    return closing + _begun_call(
        model,
        request.required_tool or None,
        msgspec.json.encode(tools),
        request.template_kwargs,
        closing,
    )


@functools.lru_cache(maxsize=KEPT_OPENINGS)
def _begun_call(
    model: ChatModel, tool: str | None, tools_json: bytes, template_kwargs: str, closing: str
) -> str:
    """Returns the longest beginning of the format's opening with the tokens that it has in every
    sample call, too."""
    opening = model.format.opening(tool)
    template = model.template_with(template_kwargs)
    before = template.rendered(ASKED, None, generation_prompt=True) + closing
    # A call of a package's format may begin in another way than its opening says.
    calls = [text for text in _sample_calls(model, tool, tools_json) if text.startswith(opening)]
    encoded = [model.encode(before + text) for text in calls[:MAX_CALLS]]
    for length in range(len(opening), 0, -1):
        begun = model.encode(before + opening[:length])
        if all(ids.startswith(begun) for ids in encoded):
            return opening[:length]
    return ""


def _sample_calls(model: ChatModel, tool: str | None, tools_json: bytes) -> Iterator[str]:
    """Yields calls as the model writes them: of each tool, first all without arguments and then
    one for each argument."""
    tools = [one for one in msgspec.json.decode(tools_json) if tool in (None, one["name"])]
    arguments: list[list[dict[str, Any]]] = [
        [{}, *({key: _sample(schema)} for key, schema in _properties(one).items())] for one in tools
    ]
    for at in range(max(map(len, arguments), default=0)):
        for one, given in zip(tools, arguments, strict=True):
            if at < len(given):
                call = CallDelta(name=one["name"], arguments=json.dumps(given[at]))
                yield model.format.write([call])


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return properties if isinstance(properties, dict) and properties else {"a": {}}


def _sample(schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, dict) else None
    return _SAMPLES.get(kind, "a") if isinstance(kind, str) else "a"
