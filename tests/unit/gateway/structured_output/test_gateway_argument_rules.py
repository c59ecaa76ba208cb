"""Required calls in every format: every text that the grammar allows is parsed as a valid call.

The policy is a random one, over real tokenizers, that likes tags of the notation, halves of them
and values of other types: all that could end a call early, or have a text read as something else.
"""

from __future__ import annotations

import functools
import json
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import settings
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from forge.core.errors import InvalidArgument
from forge.core.formats import CallDelta, collect
from forge.core.formats.registry import BUILT_IN
from forge.grammar.answer_grammar import LIMITS, source
from forge.v1 import common_pb2
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.metrics import UNENFORCED
from services.gateway.model.chat_model import ChatModel
from services.gateway.structured_output import turn_grammar as turn_grammar_module
from services.gateway.structured_output.call_syntax import notation_of
from services.gateway.structured_output.turn_grammar import turn_grammar
from tests.support.core.format_samples import CALLING, all_marks
from tests.support.gateway.chat_templates import make_tokenizer

FUZZ = settings.get_current_profile_name() == "fuzz"
MAX_TOKENS = 600
TEXTS = ["5", "-1.5", "null", "None", "true", " False", "[", "[1]", '{"a": 1}', '"', "a", "é", "\n"]
OBJECT = {"type": "object", "additionalProperties": False}
SCHEMAS: dict[str, dict[str, Any]] = {
    "nothing": {**OBJECT, "properties": {}},
    "texts": {
        **OBJECT,
        "properties": {
            "at": {"type": "string", "maxLength": 30},
            "code": {"type": "string", "pattern": "^[a-c]{2,4}$"},
            "unit": {"type": "string", "minLength": 1, "maxLength": 5},
        },
        "required": ["at"],
    },
    "listed": {
        **OBJECT,
        "properties": {
            "kind": {"enum": ["sea", "city"]},
            "number": {"enum": [1, 2.5, None, False]},
            "place": {"$ref": "#/$defs/place"},
        },
        "required": ["kind", "number", "place"],
        "$defs": {"place": {"type": "string", "enum": ["here", "there"]}},
    },
    "values": {
        **OBJECT,
        "properties": {
            "count": {"type": "integer", "minimum": 3, "maximum": 99},
            "share": {"type": "number", "minimum": -9.5, "maximum": 9.5},
            "sure": {"type": "boolean"},
            "list": {"type": "array", "items": {"enum": ["a", 1]}, "maxItems": 3},
            "point": {"$ref": "#/$defs/point"},
        },
        "required": ["count", "sure", "point"],
        "$defs": {"point": {**OBJECT, "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    },
    "either": {
        **OBJECT,
        "properties": {
            "maybe": {"anyOf": [{"type": "string", "maxLength": 20}, {"type": "null"}]},
            "size": {
                "anyOf": [{"type": "integer", "minimum": 5, "maximum": 9}, {"type": "string"}]
            },
            "word": {"$ref": "#/$defs/word"},
            "flag": {"anyOf": [{"enum": [True]}, {"type": "string", "minLength": 3}]},
        },
        "required": ["maybe", "size", "word", "flag"],
        "$defs": {"word": {"type": "string", "maxLength": 9}},
    },
}


@functools.cache
def model_of(name: str, *, added: bool) -> ChatModel:
    """A model that speaks the format; `added`: its tags are tokens of their own."""
    if not added:
        tokenizer = make_tokenizer("chatml")
    else:
        tokenizer = make_tokenizer.__wrapped__("chatml")
        tokenizer.add_tokens(sorted(BUILT_IN[name]().marks))
    return ChatModel(
        tokenizer,
        name=name,
        context_tokens=4096,
        stop_ids={tokenizer.eos_token_id},
        tool_format=name,
        reasoning_format="none",
    )


@functools.cache
def tokens_of(name: str, *, added: bool) -> LLTokenizer:
    return from_tokenizer(model_of(name, added=added)._tokenizer)


def tool(name: str, schema: dict[str, Any], *, strict: bool = True) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "strict": strict, "parameters": schema},
    }


def request(tools: list[Any], required: str | None, **fields: Any) -> TurnRequest:
    return TurnRequest(
        tools=tools,
        required_tool=required,
        sampling=common_pb2.SamplingParams(),
        arrived=Moment.now(),
        **fields,
    )


def answered(
    name: str, asked: TurnRequest, random: Random, *, added: bool, opening: str = ""
) -> str:
    """What the random policy says under the turn's grammar, behind the opening."""
    model, tokenizer = model_of(name, added=added), tokens_of(name, added=added)
    grammar = turn_grammar(model, asked, opening=opening, inside=False)
    assert grammar is not None
    text = source("lark", grammar.lark)
    matcher = LLMatcher(tokenizer, text, limits=LIMITS, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    notation = notation_of(model.format, ("look", "take"))  # type: ignore[arg-type]
    assert notation is not None
    way = notation.one_by_one
    endings = [
        notation.end,
        *([way.behind + notation.end, way.behind, way.separator] if way else []),
    ]
    endings = [text for text in [*endings, "}", '"', "]", "1"] if text]
    liked = [*endings, *all_marks(model.format), *TEXTS]
    ids: list[int] = []
    while not matcher.is_stopped():
        mask = np.unpackbits(
            np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little"
        )
        allowed = np.flatnonzero(mask[: tokenizer.vocab_size])
        assert not matcher.is_error(), matcher.get_error()
        assert len(allowed), f"nothing may follow {model.decode(array(ids))!r}"
        late = len(ids) > MAX_TOKENS // 8
        if matcher.is_accepting():
            # Nothing that was asked for is missing, and not all of it would ever end by itself.
            if late or random.random() < 0.5 or len(allowed) == 1:
                break
            allowed = allowed[allowed != tokenizer.eos_token]
        assert len(ids) < MAX_TOKENS, model.decode(array(ids))[-200:]
        likes = endings if late else [random.choice(liked)] if random.random() < 0.3 else []
        said = [encoded(model, text) for text in random.sample(likes, len(likes))]
        pieces = next((one for one in said if fits(matcher, one)), [int(random.choice(allowed))])
        matcher.compute_bitmask()
        taken = matcher.try_consume_tokens(pieces)
        assert taken == len(pieces), (pieces, matcher.get_error())
        ids += pieces
    return opening + model.decode(array(ids))


def fits(matcher: LLMatcher, ids: list[int]) -> bool:
    """Whether all of them may follow; each look has the work of one step, as an engine's has."""
    matcher.compute_bitmask()
    return bool(matcher.validate_tokens(ids) == len(ids))


def array(ids: list[int]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def encoded(model: ChatModel, text: str) -> list[int]:
    return [int(i) for i in np.frombuffer(model.encode(text), dtype="<i4")]


@pytest.mark.hypothesis
@pytest.mark.parametrize("added", [False, True], ids=["plain", "tokens"])
@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("name", CALLING)
def test_required_call_satisfies_its_schema(name: str, schema: str, added: bool) -> None:
    """For every format and kind of schema, with any tool or a named one, one call or several.
    `make properties` has all four for each tokenizer, otherwise each tokenizer has two of them."""
    tools = [tool("look", SCHEMAS[schema]), tool("take", SCHEMAS["texts"])]
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in tools}
    output = BUILT_IN[name]()
    for seed in range(2):
        for required in ("", "look"):
            if not FUZZ and bool(required) == (bool(seed) != added):
                continue
            asked = request(tools, required, parallel_calls=bool(seed))
            opening = output.opening(required or None)
            said = answered(name, asked, Random(seed), added=added, opening=opening)
            parser = output.parser(tools)
            answer = collect([*parser.feed(said), *parser.finish()], parser.error)
            assert answer.error == "", said
            assert answer.content.strip() == "", said
            assert answer.calls, said
            for call in answer.calls:
                assert required in ("", call.name)
                jsonschema.validate(json.loads(call.arguments), schemas[call.name])


PIECES = [*TEXTS, "b", " ", "\\", "'", "<", "</", "<p", "&", "\t", "\r", "/", "parameter"]
VALUES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "list": {"type": "array", "items": {}},
    "point": {"type": "object", "additionalProperties": True},
    "sure": {"type": "boolean"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "any": {},
}


def some_arguments(name: str, random: Random) -> dict[str, Any]:
    def text() -> str:
        return "".join(random.choices(PIECES, k=random.randrange(6)))

    def value(depth: int = 0) -> Any:
        scalars = [text(), 10**12, -1.25]
        # The words of Python are read, and those of JSON are what calls are held to.
        scalars += [] if name == "pythonic" else [True, False, None]
        below = [[], {}] if depth > 2 else [[value(depth + 1)], {text(): value(depth + 1)}]
        return random.choice([*scalars, *below])

    made = {
        "text": text(),
        "count": random.randrange(-99, 99),
        "share": random.choice([1, 2.5]),
        "list": [value() for _ in range(random.randrange(3))],
        "point": {text(): value() for _ in range(random.randrange(3))},
        "sure": random.random() < 0.5,
        "maybe": random.choice([text(), None]),
        "any": value(),
    }
    left_out = {"sure", "maybe"} if name == "pythonic" else set()
    return {key: made[key] for key in made if key not in left_out and random.random() < 0.7}


@pytest.mark.hypothesis
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", CALLING)
def test_grammar_allows_every_call_that_is_parsed_back(name: str, strict: bool) -> None:
    """A call in the format's spelling is allowed token for token: the grammar does not limit a
    model that masters its format."""
    model, output, random = model_of(name, added=strict), BUILT_IN[name](), Random(name)
    tools = [tool("look", {**OBJECT, "properties": VALUES}, strict=strict)]
    opening, allowed = output.opening("look"), 0
    grammar = turn_grammar(model, request(tools, "look"), opening=opening, inside=False)
    assert grammar is not None
    calls = 40 if FUZZ else 16
    for _ in range(calls):
        arguments = json.dumps(some_arguments(name, random), ensure_ascii=False)
        written = output.write([CallDelta(name="look", arguments=arguments)])
        parser = output.parser(tools)
        answer = collect([*parser.feed(written), *parser.finish()], parser.error)
        if answer.error or [call.arguments for call in answer.calls] != [arguments]:
            continue  # Nothing is escaped: some texts cannot be written.
        limited = source("lark", grammar.lark)
        matcher = LLMatcher(tokens_of(name, added=strict), limited, limits=LIMITS, log_level=0)
        for token in encoded(model, written.removeprefix(opening)):
            matcher.compute_bitmask()
            assert matcher.consume_token(token), written
        assert matcher.is_accepting() or matcher.is_stopped(), written
        allowed += 1
    assert allowed > calls // 4


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax_m2"])
def test_arguments_of_tools_without_strict_are_free(name: str) -> None:
    """Argument names are those of the tool, each once, with any values."""
    asked = request([tool("look", SCHEMAS["either"], strict=False)], "look")
    output = BUILT_IN[name]()
    for seed in range(5):
        said = answered(name, asked, Random(seed), added=False, opening=output.opening("look"))
        parser = output.parser(asked.tools)
        answer = collect([*parser.feed(said), *parser.finish()], parser.error)
        assert answer.error == "", said
        for call in answer.calls:
            assert set(json.loads(call.arguments)) <= set(SCHEMAS["either"]["properties"])
    free = {"type": "object", "additionalProperties": True}
    unknown = request([tool("look", free, strict=False)], "look")
    opening = output.opening("look")
    model = model_of(name, added=False)
    assert turn_grammar(model, unknown, opening=opening, inside=False) is None


def many_tools(count: int, *, strict: bool) -> list[dict[str, Any]]:
    """With ten arguments each, of two kinds."""
    kinds = ({"type": "string"}, {"type": "integer"})
    properties = {f"argument_{at}": kinds[at % 2] for at in range(10)}
    schema = {**OBJECT, "properties": properties, "required": list(properties)}
    return [tool(f"some_tool_{at}", schema, strict=strict) for at in range(count)]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax_m2"])
def test_tools_may_have_hundreds_of_arguments(name: str, strict: bool) -> None:
    """A rule that many of them share is written once, so that engines accept the grammar."""
    model, output = model_of(name, added=True), BUILT_IN[name]()
    asked = request(many_tools(30, strict=strict), "")
    grammar = turn_grammar(model, asked, opening=output.opening(None), inside=False)
    assert grammar is not None
    text = source("lark", grammar.lark)
    assert not LLMatcher(tokens_of(name, added=True), text, limits=LIMITS).is_error()


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax_m2"])
def test_calls_of_too_many_tools_are_left_to_the_model(name: str) -> None:
    """Only the opening is forced, and beside an answer format the call is free; no engine gets a
    grammar that it must refuse. Strict tools are counted."""
    model, output = model_of(name, added=True), BUILT_IN[name]()

    def counted(strict: bool, required: str | None, **grammar: Any) -> tuple[Any, float]:
        before = UNENFORCED._value.get()
        asked = request(many_tools(200, strict=strict), required)
        asked.sampling.grammar.MergeFrom(common_pb2.Grammar(**grammar))
        if not grammar:
            asked.sampling.ClearField("grammar")
        opening = "" if required is None else output.opening(None)
        made = turn_grammar(model, asked, opening=opening, inside=False)
        return made, UNENFORCED._value.get() - before

    assert counted(False, "") == (None, 0)
    assert counted(True, "") == (None, 1)
    assert counted(True, None) == (None, 1)
    beside, times = counted(True, None, json_schema='{"type": "object"}')
    assert times == 1
    assert len(source("lark", beside.lark)) < 10_000


def test_grammar_of_the_same_tools_is_built_once() -> None:
    """Agents send them with every call, and each argument costs time."""
    model, opening = model_of("glm", added=False), BUILT_IN["glm"]().opening(None)
    made = [
        turn_grammar(model, request(many_tools(20, strict=True), ""), opening=opening, inside=False)
        for _ in range(3)
    ]
    assert made[0] is not None
    assert made == [made[0]] * 3
    assert turn_grammar_module._lark.cache_info().hits >= 2


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {}}, "parameters of look/properties/a cannot be enforced .*it has no type"),
        ({"enum": ["5", 6]}, '"5" would be read as 5'),
        ({"type": "string", "format": "date"}, "format"),
        ({"type": ["string", "integer"], "minimum": 3}, "minimum"),
        ({"type": "string", "pattern": "^a|b$"}, "pattern"),
        ({"enum": ["</parameter>"]}, "tag"),
        ({"$ref": "#/properties/a"}, r"\$defs"),
        ({"$ref": "#/$defs/loop"}, "to itself"),
    ],
)
def test_strict_schema_that_a_format_cannot_enforce_is_refused(schema: Any, words: str) -> None:
    """The error names the place in the schema."""
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}]}
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": {"loop": loop}}
    asked = request([tool("look", parameters)], None)
    with pytest.raises(InvalidArgument, match=words):
        turn_grammar(model_of("qwen3_coder", added=False), asked, opening="", inside=False)
