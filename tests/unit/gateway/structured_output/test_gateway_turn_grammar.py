"""The grammar of one turn: allowed texts of each format, and refused requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from forge.core.errors import InvalidArgument
from forge.core.formats import collect, get_format
from forge.core.formats.registry import BUILT_IN
from forge.v1 import common_pb2
from services.gateway.structured_output.call_syntax import notation_of
from services.gateway.structured_output.response_format import answer_grammar
from services.gateway.structured_output.turn_grammar import check
from tests.support.gateway.chat_templates import make_model, make_tokenizer
from tests.support.gateway.turn_grammars import Judge, grammar_of, request

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}


def tool(name: str, *, strict: bool | None = None, **schema: Any) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "parameters": schema or POINT}
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def held_to(schema: Any) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(grammar=common_pb2.Grammar(json_schema=json.dumps(schema)))


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_schema_without_tools_is_passed_on_whole() -> None:
    """Also without reasoning: any engine accepts it."""
    asked = request(sampling=held_to(POINT))
    assert grammar_of(make_model("smollm2"), asked) == asked.sampling.grammar
    assert grammar_of(make_model("chatml"), request()) is None


def test_answer_grammar_allows_reasoning() -> None:
    """A reasoning model may think first, and must end it if the prompt has begun it."""
    model = make_model("qwen3")
    asked = request(sampling=held_to(POINT))
    free = Judge("qwen3", grammar_of(model, asked))
    assert free('{"x": 1}') == "whole"
    assert free('<think>\nhm {"y"</think>\n\n{"x": 1}') == "whole"
    assert free("<think>hm") == "begun"
    assert free("hm") == "wrong"
    assert free('{"y": 1}') == "wrong"
    inside = Judge("qwen3", grammar_of(model, asked, inside=True))
    assert inside('hm</think>\n\n{"x": 1}') == "whole"
    assert inside('{"x": 1}') == "begun"


def test_answer_beside_tools_has_its_schema_or_is_calls() -> None:
    """With tools at hand an answer is of the form asked for, or calls and nothing else."""
    asked = request(sampling=held_to(POINT), tools=[tool("look"), tool("take", strict=True)])
    judge = Judge("chatml", grammar_of(make_model("chatml"), asked))
    assert judge('{"x": 1}') == "whole"
    assert judge(call("look", '{"whatever": [1]}')) == "whole"
    assert judge(call("take", '{"x": 1}') + "\n" + call("look", "{}")) == "whole"
    assert judge(call("take", '{"whatever": [1]}')) == "wrong"
    assert judge(call("drop", "{}")) == "wrong"
    assert judge("I think") == "wrong"


@pytest.mark.parametrize(("required", "named"), [("", 'look", "arguments": '), ("look", "")])
def test_required_call_is_complete(required: str, named: str) -> None:
    """After the opening only the rest of calls of that tool, or of any tool, is allowed."""
    model = make_model("chatml")
    tools = [tool("look"), tool("take", strict=True)]
    asked = request(tools=tools, required_tool=required)
    opening = model.format.opening(required or None)
    judge = Judge("chatml", grammar_of(model, asked, opening=opening))
    assert judge(named + '{"at": "a"}}\n</tool_call>') == "whole"
    assert judge(named + "{}}\n</tool_call>\n" + call("look", "{}")) == "whole"
    assert judge(named + '{"at": "a"}}') == "begun"
    assert judge(named + '"a"}\n</tool_call>') == "wrong"
    assert judge(named + "{}}\n</tool_call> And") == "wrong"
    assert judge(named + "{}}\n</tool_call>\n" + call("take", '{"y": 1}')) == "wrong"
    alone = request(tools=tools, required_tool=required, parallel_calls=False)
    judge = Judge("chatml", grammar_of(model, alone, opening=opening))
    assert judge(named + "{}}\n</tool_call>\n" + call("look", "{}")) == "wrong"


def test_strict_tools_bind_calls_and_not_text() -> None:
    """Text is free until a call begins; a call of a strict tool has valid arguments."""
    asked = request(tools=[tool("look"), tool("take", strict=True)])
    judge = Judge("chatml", grammar_of(make_model("chatml"), asked))
    assert judge("") == "whole"
    assert judge('Well: {"x"') == "whole"
    assert judge("Let me see.\n" + call("take", '{"x": 1}')) == "whole"
    assert judge(call("look", '{"y": 1}')) == "whole"
    assert judge("So " + call("take", '{"y": 1}')) == "wrong"
    assert judge("So <tool_call>well") == "wrong"
    assert judge("So </tool_call> it is.") != "whole"
    assert grammar_of(make_model("chatml"), request(tools=[tool("look")])) is None
    lax = request(tools=[tool("take", strict=True)], call_tools=False)
    assert grammar_of(make_model("chatml"), lax) is None


def test_added_tokens_are_named_by_their_ids() -> None:
    """Tags that are single tokens of the tokenizer are token ids in the grammar."""
    model = make_model("chatml")
    pieces = model.added_tokens_in("a<|im_start|>b <|im_end|>")
    starts, ends = (
        make_tokenizer("chatml").convert_tokens_to_ids(f"<|im_{x}|>") for x in ("start", "end")
    )
    assert pieces == ["a", starts, "b ", ends]
    assert model.added_tokens_in("") == []


@pytest.mark.parametrize("name", BUILT_IN)
def test_call_syntax_of_every_format_is_parsed_back(name: str) -> None:
    """The text around arguments makes complete calls, for any spelling of the arguments."""
    output = get_format(name)
    if not output.takes_tools:
        return
    formats: Any = output  # A protocol declares no __hash__, but formats are plain objects.
    notation = notation_of(formats, ("look", "take"))
    assert notation is not None
    way = notation.one_by_one
    one_by_one = {"qwen3_coder", "glm", "minimax_m2", "pythonic"}
    assert (way is not None) == (name in one_by_one)

    def arguments(key: str) -> str:
        return f"{way.before}{key}{way.between}1{way.behind}" if way else f'{{"{key}": 1}}'

    text = notation.first[0] + arguments("a")
    if notation.further:
        text += notation.further[1] + arguments("b")
    parser = output.parser()
    answer = collect([*parser.feed(text + notation.end), *parser.finish()], parser.error)
    assert answer.error == ""
    assert [json.loads(call.arguments) for call in answer.calls] == [{"a": 1}, {"b": 1}][
        : 1 + bool(notation.further)
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sampling": held_to(POINT), "tools": [tool("look")], "required_tool": ""}, "tool_choice"),
        ({"sampling": held_to(POINT), "stop": ["x"]}, "stop"),
        ({"sampling": held_to({"type": "strin"})}, "sampling.grammar.json_schema"),
        (
            {"tools": [tool("a"), tool("b", strict=True, properties={"c": {"not": {}}})]},
            "tools[1].function.parameters/properties/c",
        ),
    ],
)
def test_unsupported_grammar_requests_are_refused(fields: dict[str, Any], words: str) -> None:
    """The error names the field, and for a schema the place in it."""
    with pytest.raises(InvalidArgument) as refused:
        asyncio.run(check(request(**fields)))
    assert words in str(refused.value)


def test_schema_is_checked_on_arrival() -> None:
    """Strict: every keyword can be enforced, or the error names its place; else it is left to the
    model."""
    cannot = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}

    def asked(strict: bool) -> common_pb2.Grammar | None:
        return asyncio.run(answer_grammar("json_schema", cannot, strict=strict, field="f"))

    with pytest.raises(InvalidArgument, match=r"f/properties/a cannot .*uniqueItems"):
        asked(True)
    lenient = asked(False)
    assert lenient is not None
    assert lenient.lenient
    assert asyncio.run(answer_grammar("text", field="f")) is None
    anything = asyncio.run(answer_grammar("json_object", field="f"))
    assert Judge("chatml", anything)('{"a": [1, null]}') == "whole"
    with pytest.raises(InvalidArgument, match="f is missing"):
        asyncio.run(answer_grammar("json_schema", None, field="f"))
