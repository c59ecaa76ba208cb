"""Gemini requests: parts become messages, options become parameters, the rest is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forge.core.conversation.messages import Image, Message, ToolCall
from forge.core.errors import InvalidArgument
from services.gateway.http.gemini import schema
from services.gateway.http.gemini.history import messages_of, prefill_of
from services.gateway.http.gemini.json_schema import json_schema
from services.gateway.http.message_parts.images import placeholder
from services.gateway.http.request_fields.parameters import IGNORED, decode_request
from tests.support.gateway.chat_templates import make_model

FORMAT = make_model("chatml").format
LOOK = {"functionDeclarations": [{"name": "look", "parameters": {"type": "OBJECT"}}]}


def asked(**fields: Any) -> tuple[schema.GenerateContentRequest, dict[str, str]]:
    return decode_request(json.dumps(fields).encode(), schema.GenerateContentRequest, schema.FIELDS)


def read(*contents: Any, **fields: Any) -> list[Message]:
    return list(messages_of(asked(contents=contents, **fields)[0], placeholder))


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": [*parts]}


def model(*parts: Any) -> dict[str, Any]:
    return {"role": "model", "parts": [*parts]}


def response(value: Any, **fields: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": "look", "response": value} | fields}


def test_parts_become_messages() -> None:
    """System first; a user's content is split at results; a model's has thoughts and calls."""
    call = {"functionCall": {"id": "c", "name": "look", "args": {"n": 1}}}
    image = {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}
    messages = read(
        user({"text": "a"}, image),
        model({"text": "hm", "thought": True}, {"text": "so"}, call),
        user(response({"result": "x"}, id="c"), response({"a": [1]}), {"text": "b"}),
        system_instruction={"parts": [{"text": "Be "}, {"text": "brief."}]},
    )
    png = Image(media_type="image/png", size_bytes=3)
    assert messages == [
        Message(role="system", content="Be brief."),
        Message(role="user", content="a[image omitted: image/png, 3 bytes]", images=(png,)),
        Message(
            role="assistant",
            content="so",
            reasoning="hm",
            tool_calls=(ToolCall(name="look", arguments='{"n": 1}', call_id="c"),),
        ),
        Message(role="tool", content="x", tool_call_id="c", name="look"),
        Message(role="tool", content='{"a": [1]}', name="look"),
        Message(role="user", content="b"),
    ]


def test_a_later_request_is_recognized_by_its_beginning() -> None:
    """Only the new contents are decoded, with the same result, and errors are named alike."""
    before = [user(response({"result": "1"}), response({"result": "2"})), model({"text": "ok"})]
    system = {"parts": [{"text": "Be brief."}]}

    def history(*contents: Any) -> Any:
        request, _ = asked(contents=[*contents], systemInstruction=system)
        return messages_of(request, placeholder)

    known = history(*before, user({"text": "a"})).mark()
    later = history(*before, user({"text": "a"}), model({"text": "b"}), user({"text": "c"}))
    assert later.behind(later.known([known])) == list(later)[known.messages :]
    wrong = history(*before, user({"text": "a"}), user({"fileData": {"mimeType": "video/mp4"}}))
    with pytest.raises(InvalidArgument, match=r"contents\[3\].parts\[0\].*'video/mp4'"):
        wrong.behind(wrong.known([known]))


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        ([], "must not be empty"),
        ([{"role": "king", "parts": []}], r"contents\[0\]: role 'king'"),
        ([user({"executableCode": {}})], r"parts\[0\]: .*executableCode"),
        ([user({"functionCall": {"name": "x"}})], "functionCall"),
        ([model({"functionCall": {"name": "x", "args": 1}})], "object as its args"),
        ([user({"text": 7})], r"contents\[0\].parts\[0\].text"),
    ],
)
def test_other_contents_are_refused_with_their_place(contents: list[Any], says: str) -> None:
    """By the agent's numbering."""
    with pytest.raises(InvalidArgument, match=says):
        read(*contents)


def test_a_last_content_of_the_model_is_continued() -> None:
    """As over the other protocols."""
    request, _ = asked(contents=[user({"text": "a"}), model({"text": "It is"})])
    before, prefill = prefill_of(request, messages_of(request, placeholder))
    assert (len(before), prefill) == (1, "It is")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {
                "type": "OBJECT",
                "properties": {"b": {"type": "STRING"}, "a": {"type": "INTEGER"}},
                "propertyOrdering": ["a", "b"],
            },
            {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        ),
        (
            {"type": "ARRAY", "items": {"type": "NUMBER"}, "minItems": "2", "example": [1]},
            {"type": "array", "items": {"type": "number"}, "minItems": 2},
        ),
        ({"type": "STRING", "nullable": True}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
    ],
)
def test_schemas_become_json_schemas(given: Any, expected: Any) -> None:
    """Order included, which is the order of the answer."""
    assert json.dumps(json_schema(given)) == json.dumps(expected)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"responseMimeType": "application/json"}, "json_schema"),
        (
            {"response_mime_type": "application/json", "response_schema": {"type": "STRING"}},
            "json_schema",
        ),
        (
            {"responseMimeType": "text/x.enum", "responseSchema": {"enum": ["a", "b"]}},
            "regex",
        ),
        ({"responseMimeType": "text/plain"}, None),
    ],
)
async def test_response_types_become_grammars(config: Any, kind: str | None) -> None:
    """In camel case and in snake case."""
    request, headers = asked(generationConfig=config)
    grammar = await schema.grammar_of(schema.config_of(request, headers))
    assert (grammar and grammar.WhichOneof("kind")) == kind


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"responseMimeType": "application/xml"}, "application/xml"),
        ({"responseSchema": {"type": "STRING"}}, "'text/plain' with a schema"),
        ({"topP": 7}, "top_p = 7"),
        ({"maxOutputTokens": 0}, "maxOutputTokens = 0"),
        ({"temperature": "hot"}, "generationConfig is not valid"),
        ({"speechConfig": {"a": 1}}, "speechConfig is not supported"),
        ({"responseModalities": ["IMAGE"]}, "'IMAGE'"),
        ({"logprobs": 3}, "responseLogprobs"),
    ],
)
async def test_other_options_are_refused(config: Any, says: str) -> None:
    """By name and value."""
    request, headers = asked(generationConfig=config)
    with pytest.raises(InvalidArgument, match=says):
        parsed = schema.config_of(request, headers)
        schema.sampling_of(parsed)
        await schema.grammar_of(parsed)


def test_thinking_sets_the_variables_of_the_template() -> None:
    """Or is named in the header."""
    request, headers = asked(
        generationConfig={"thinkingConfig": {"thinkingBudget": 0, "thinkingLevel": "LOW"}}
    )
    config = schema.config_of(request, headers)
    variables = {"enable_thinking", "reasoning_effort"}
    kwargs = schema.template_kwargs_of(config, variables, headers)
    assert (json.loads(kwargs), headers) == (
        {"enable_thinking": False, "reasoning_effort": "low"},
        {},
    )
    assert schema.template_kwargs_of(config, (), headers) == ""
    place = "generationConfig.thinkingConfig"
    assert headers[IGNORED] == f"{place}.thinkingBudget, {place}.thinkingLevel"


def test_hosted_tools_are_refused_or_left_out() -> None:
    """Web search by its setting; others always."""
    request, _ = asked(tools=[LOOK, {"google_search": {}}])
    tools, omitted = schema.tools_of(request, omit_web_search=True)
    assert [tool["function"]["name"] for tool in tools] == ["look"]
    assert omitted == ["googleSearch"]
    with pytest.raises(InvalidArgument, match=r"tools\[1\].googleSearch"):
        schema.tools_of(request, omit_web_search=False)
    request, _ = asked(tools=[{"codeExecution": {}}])
    with pytest.raises(InvalidArgument, match="codeExecution"):
        schema.tools_of(request, omit_web_search=True)


@pytest.mark.parametrize(
    ("config", "required"),
    [
        ({"mode": "AUTO"}, None),
        ({"mode": "ANY"}, "look"),
        ({"mode": "ANY", "allowedFunctionNames": ["look"]}, "look"),
    ],
)
def test_calling_modes(config: Any, required: str | None) -> None:
    """`ANY` requires a call; a foreign name is refused."""
    request, _ = asked(tools=[LOOK], toolConfig={"functionCallingConfig": config})
    tools, _ = schema.tools_of(request, omit_web_search=False)
    assert schema.required_tool(request, tools, FORMAT) == required
    request, _ = asked(
        tools=[LOOK],
        tool_config={"function_calling_config": {"mode": "ANY", "allowed_function_names": ["x"]}},
    )
    with pytest.raises(InvalidArgument, match="'x'"):
        schema.required_tool(request, tools, FORMAT)
