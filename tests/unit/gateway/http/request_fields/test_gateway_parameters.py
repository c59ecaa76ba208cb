"""Fields of requests that are not used: harmless, named in the response, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from forge.core.conversation.messages import Message
from forge.core.errors import InvalidArgument
from forge.v1 import common_pb2
from services.gateway.http.anthropic import history, schema
from services.gateway.http.message_parts.prefill import split_prefill
from services.gateway.http.openai.completions import chat_schema
from services.gateway.http.openai.completions.completions_schema import (
    CompletionRequest,
    prompts_of,
)
from services.gateway.http.openai.fields import CHAT, COMPLETIONS, RESPONSES
from services.gateway.http.openai.responses.schema import ResponsesRequest
from services.gateway.http.request_fields.parameters import IGNORED, decode_request
from services.gateway.http.request_fields.request_body import decode

LEAST: dict[Any, tuple[Any, dict[str, Any]]] = {
    chat_schema.ChatCompletionRequest: (CHAT, {"model": "m", "messages": []}),
    CompletionRequest: (COMPLETIONS, {"model": "m"}),
    ResponsesRequest: (RESPONSES, {"model": "m"}),
    schema.MessagesRequest: (schema.FIELDS, {"model": "m", "max_tokens": 1, "messages": []}),
    schema.CountTokensRequest: (schema.COUNT_FIELDS, {"model": "m", "messages": []}),
}


def asked(kind: Any = chat_schema.ChatCompletionRequest, **fields: Any) -> Any:
    known, least = LEAST[kind]
    return decode_request(json.dumps(least | fields).encode(), kind, known)


@pytest.mark.parametrize("kind", LEAST)
def test_an_unknown_field_is_named_in_the_response(kind: Any) -> None:
    """In every protocol; a request of known fields has no such header."""
    assert asked(kind)[1] == {}
    assert asked(kind, metadata={"a": "b"})[1] == {}
    headers = asked(kind, zeal=0.5, **{"odd\r\nname": 1})[1]
    assert headers == {IGNORED: "?, zeal"}


def test_the_header_is_bounded() -> None:
    """However many unknown fields a request has."""
    headers = asked(**{f"field_{number}": 1 for number in range(500)})[1]
    assert len(headers[IGNORED]) == 1000


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"frequency_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}}, None),
        ({"verbosity": "low"}, "verbosity"),
    ],
)
def test_field_without_effect_is_named_unless_neutral(
    fields: dict[str, Any], named: str | None
) -> None:
    """Many clients send neutral values with every request."""
    assert asked(**fields)[1].get(IGNORED) == named


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        (chat_schema.ChatCompletionRequest, {"use_beam_search": True}, "use_beam_search = true"),
        (chat_schema.ChatCompletionRequest, {"prompt_logprobs": 3}, "prompt_logprobs = 3"),
        (chat_schema.ChatCompletionRequest, {"bad_words": ["a"] * 99}, r'bad_words = \["a", .*\.'),
        (chat_schema.ChatCompletionRequest, {"skip_special_tokens": False}, "= false"),
        (CompletionRequest, {"best_of": 4}, "best_of = 4"),
        (CompletionRequest, {"suffix": "}"}, "suffix"),
        (ResponsesRequest, {"ignore_eos": True}, "ignore_eos = true"),
    ],
)
def test_unsupported_effect_is_refused(kind: Any, fields: dict[str, Any], says: str) -> None:
    """With the name and the value of the field; neutral values pass."""
    with pytest.raises(InvalidArgument, match=says):
        asked(kind, **fields)
    asked(skip_special_tokens=True, best_of=None, use_beam_search=False)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"min_tokens": -1}, "min_tokens = -1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens = 9 must be from 0 to 8"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids\[0\] = -1"),
        ({"stop_token_ids": [1] * 200}, "stop_token_ids has 200 ids"),
    ],
)
def test_lengths_and_stop_tokens_out_of_range_are_refused(
    fields: dict[str, Any], says: str
) -> None:
    """By name and value."""
    with pytest.raises(InvalidArgument, match=says):
        chat_schema.sampling_of(asked(**fields)[0])


def test_reasoning_effort_sets_the_variable_of_the_template_or_is_named() -> None:
    """As OpenAI's own template has it."""
    request, headers = asked(reasoning_effort="low")
    kwargs = chat_schema.template_kwargs_of(request, {"reasoning_effort"}, headers)
    assert (kwargs, headers) == ('{"reasoning_effort":"low"}', {})
    assert chat_schema.template_kwargs_of(request, (), headers) == ""
    assert headers == {IGNORED: "reasoning_effort"}


GUIDED = [
    ({"guided_json": {"type": "object", "required": ["a"]}}, '{"a":1}', "{}"),
    ({"guided_json": '{"enum": ["a"]}'}, '"a"', '"b"'),
    ({"guided_json_object": True}, "{}", "[]"),
    ({"guided_regex": "a+b"}, "aab", "ab!"),
    ({"guided_choice": ["a.b", "[x] (y)", "c/d\n-~"]}, "c/d\n-~", "axb"),
    ({"guided_grammar": 'root ::= "yes" | "no"'}, "no", "maybe"),
    ({"guided_grammar": 'start: "yes" | "no"'}, "yes", "maybe"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "b", "c"),
    ({"structured_outputs": {"json": {"enum": [7]}}}, "7", "8"),
]


@pytest.mark.parametrize(("fields", "right", "wrong"), GUIDED)
async def test_guided_decoding_allows_only_its_answers(
    fields: dict[str, Any], right: str, wrong: str
) -> None:
    """In all forms of vLLM's parameters, old and new."""
    grammar = await chat_schema.answer_grammar_of(asked(**fields)[0])
    assert grammar is not None
    matches = {text: matched(grammar, text) for text in (right, wrong)}
    assert matches == {right: True, wrong: False}


def matched(grammar: common_pb2.Grammar, text: str) -> bool:
    """Whether a grammar takes a text, of bytes as tokens."""
    from llguidance import LLTokenizer

    from forge.grammar.answer_grammar import source

    kind = grammar.WhichOneof("kind")
    assert kind is not None
    matcher = LLMatcher(LLTokenizer("byte"), source(kind, getattr(grammar, kind)))
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex and guided_choice exclude"),
        ({"guided_json": "{"}, "guided_json is not a JSON Schema"),
        ({"structured_outputs": {"grammar": ""}}, "grammar is neither Lark nor GBNF: No 'root'"),
        ({"guided_json": {"uniqueItems": True}}, "guided_json.* cannot be enforced"),
        ({"guided_choice": []}, "guided_choice has 0 texts"),
        ({"guided_grammar": 'root ::= "'}, "guided_grammar is neither Lark nor GBNF"),
        (
            {"guided_grammar": f'start: "{"é" * 70_000}"'},
            "guided_grammar is longer than 131072 bytes",
        ),
        ({"guided_json": {"const": "é" * 70_000}}, "guided_json has 140013 bytes as JSON"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format and guided decoding",
        ),
    ],
)
async def test_guided_decoding_that_cannot_be_enforced_is_refused(
    fields: dict[str, Any], says: str
) -> None:
    """By name, and never in part."""
    with pytest.raises(InvalidArgument, match=says):
        await chat_schema.answer_grammar_of(asked(**fields)[0])


def test_an_unknown_form_of_structured_outputs_is_refused() -> None:
    """It would change the answer, so it is not dropped."""
    with pytest.raises(InvalidArgument, match="structural_tag"):
        asked(structured_outputs={"structural_tag": "{}"})


USER = {"role": "user", "content": "Six times seven?"}
SAID = {"role": "assistant", "content": "It is"}


@pytest.mark.parametrize(
    ("messages", "flags", "says"),
    [
        ([USER, SAID], {"add_generation_prompt": True}, "needs add_generation_prompt = false"),
        ([USER], {}, "role 'user', not 'assistant'"),
        ([USER, SAID | {"content": ""}], {}, "must have text"),
        ([USER, SAID | {"reasoning_content": "hm"}], {}, "neither tool calls nor reasoning"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(
    messages: list[Any], flags: dict[str, Any], says: str
) -> None:
    """With the reason."""
    request, _ = asked(messages=messages, continue_final_message=True, **flags)
    with pytest.raises(InvalidArgument, match=says):
        chat_schema.prefill_of(request, chat_schema.messages_of(request))


@pytest.mark.parametrize("flags", [{"add_generation_prompt": False}, {"echo": True}])
def test_flags_of_prefill_alone_are_refused(flags: dict[str, Any]) -> None:
    """They would be dropped."""
    request, _ = asked(messages=[USER, SAID], **flags)
    with pytest.raises(InvalidArgument, match="continue_final_message = true"):
        chat_schema.prefill_of(request, chat_schema.messages_of(request))


@pytest.mark.parametrize(
    ("last", "prefill"),
    [
        ({"role": "assistant", "content": "It is"}, "It is"),
        ({"content": [{"type": "text", "text": '"role": "user"'}], "role": "assistant"}, "="),
        ({"role": "user", "content": "assistant"}, ""),
        ({"content": [{"text": "assistant", "type": "text"}], "role": "user"}, ""),
        ({"role": "user", "content": 'the "assistant" said'}, ""),
    ],
)
def test_conversation_that_ends_with_the_assistant_is_a_prefill(
    last: dict[str, Any], prefill: str
) -> None:
    """For any order of its fields, and any words in its texts."""
    messages = [USER, {"role": "assistant", "content": "no"}, USER, last]
    body = json.dumps({"model": "m", "max_tokens": 1, "messages": messages}).encode()
    request = decode(body, schema.MessagesRequest)
    before, begun = history.prefill_of(request, history.messages_of(request))
    assert begun == (last["content"][0]["text"] if prefill == "=" else prefill)
    assert len(before) == (3 if prefill else 4)


def test_split_of_a_prefill_keeps_earlier_messages() -> None:
    """Only the last one is removed."""
    user, said = Message(role="user", content="a"), Message(role="assistant", content="b")
    assert split_prefill([user, said]) == ([user], "b")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts_are_texts_or_ids(prompt: Any, prompts: list[Any]) -> None:
    """In the four forms of the protocol."""
    assert prompts_of(asked(CompletionRequest, prompt=prompt)[0]) == prompts


@pytest.mark.parametrize("prompt", ["", [], [[]], [1, "a"], ["a"] * 129])
def test_other_prompts_are_refused(prompt: Any) -> None:
    """Empty ones, mixed ones and too many."""
    with pytest.raises(InvalidArgument, match="prompt"):
        prompts_of(asked(CompletionRequest, prompt=prompt)[0])
