"""Builds the grammar of one turn.

Owns the combination of the answer's grammar, strict tool schemas and a required call with the
model's reasoning and call syntax (`services.gateway.structured_output.call_syntax`).
`services.gateway.structured_output.argument_rules` has the rules of arguments that are not JSON.
Owns no tokens and no masks.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from llguidance import regex_to_lark

from forge.core.errors import InvalidArgument
from forge.core.formats import CallDelta, OutputFormat, reads_channels
from forge.grammar.answer_grammar import MAX_GRAMMAR_BYTES, guided
from forge.v1 import common_pb2
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.errors import InvalidField
from services.gateway.metrics import UNENFORCED
from services.gateway.model.chat_model import ChatModel, Tools
from services.gateway.structured_output.argument_rules import Arguments
from services.gateway.structured_output.call_syntax import (
    Notation,
    lark_escaped,
    notation_of,
    spelt,
)
from services.gateway.structured_output.response_format import check_schema_of

KEPT_GRAMMARS = 64
_ANY_TEXT = "/(?s:.+)/"
_ANY_TOKENS = "<[*]>*"
"""Special tokens too."""
_ANY_ARGUMENTS = {"type": "object"}


async def check(request: TurnRequest) -> None:
    """Raises `InvalidArgument` for fields that exclude each other, and for strict schemas that
    cannot be enforced, with the place in the schema."""
    if request.prompt_ids:
        return
    if request.sampling.HasField("grammar"):
        if request.required_tool is not None:
            raise InvalidArgument(
                "a response format and a required tool call exclude each other: "
                "remove response_format or tool_choice"
            )
        if request.prefill:
            raise InvalidArgument(
                "a response format and the beginning of an answer (prefill) exclude each other"
            )
        if request.sampling.min_tokens:
            raise InvalidField(
                "min_tokens is not supported with a response format: the answer may end before",
                param="min_tokens",
            )
        if request.stop:
            raise InvalidField(
                "stop is not supported with a response format: it would cut the answer",
                param="stop",
            )
        answer = request.sampling.grammar
        if answer.WhichOneof("kind") == "json_schema":
            field = "sampling.grammar.json_schema"
            await check_schema_of(
                _object(answer.json_schema, field), strict=not answer.lenient, field=field
            )
    if request.prefill and request.required_tool is not None:
        raise InvalidField(
            "tool_choice requires a call, and the beginning of the answer (prefill) is text",
            param="tool_choice",
        )
    if request.call_tools:
        for at, tool in enumerate(request.tools):
            if _is_strict(tool):
                await check_schema_of(
                    _parameters(tool), strict=True, field=f"tools[{at}].function.parameters"
                )


def turn_grammar(
    model: ChatModel, request: TurnRequest, *, opening: str, inside: bool
) -> common_pb2.Grammar | None:
    """Returns the grammar of the tokens after `opening`; None without constraints.

    `inside`: the answer begins with reasoning.
    """
    answer = request.sampling.grammar if request.sampling.HasField("grammar") else None
    if request.prompt_ids or (answer is not None and answer.WhichOneof("kind") == "lark"):
        return answer
    callable_tools = request.call_tools and model.format.takes_tools and request.tools
    wanted = answer is not None or request.required_tool is not None
    # Most requests end here, before the expensive part.
    if not wanted and not any(_is_strict(tool) for tool in callable_tools or ()):
        return None
    if reads_channels(model.format) and request.required_tool is None:
        if answer is not None:
            raise InvalidArgument(
                f"response_format is not supported for format {model.format.name}: Forge has no "
                "grammar for its channels"
            )
        if any(_is_strict(tool) for tool in callable_tools or ()):
            UNENFORCED.inc()
        return None
    if answer is not None and model.reasoning is None and not callable_tools:
        return answer
    lark, unenforced = _lark(
        model,
        msgspec.json.encode(callable_tools or ()),
        request.required_tool,
        request.parallel_calls,
        answer.SerializeToString(deterministic=True) if answer is not None else None,
        opening,
        inside,
    )
    if unenforced:
        UNENFORCED.inc()
    return common_pb2.Grammar(lark=lark) if lark else None


@functools.lru_cache(maxsize=KEPT_GRAMMARS)
def _lark(
    model: ChatModel,
    tools_json: bytes,
    required_tool: str | None,
    several: bool,
    answer_bytes: bytes | None,
    opening: str,
    inside: bool,
) -> tuple[str, bool]:
    """Returns the grammar's text, "" without constraints, and whether strict tools are unenforced.

    Cached, because agents send equal tools with every call and each argument takes time.
    """
    tools: Tools = msgspec.json.decode(tools_json)
    calls = _Calls(model, tools, required_tool, several=several) if tools else None
    answer = common_pb2.Grammar.FromString(answer_bytes) if answer_bytes is not None else None
    while True:
        rules = _rules(calls, answer, opening=opening, required=required_tool is not None)
        if rules is None:
            return "", calls is not None and calls.unenforced
        # A required call comes without reasoning; the opening has ended what the template began.
        start, more = "body", list[str]()
        if required_tool is None and not opening:
            start, more = _reasoning(model, inside=inside), _reasoning_rules(model)
        text = "\n".join(["%llguidance {}", f"start: {start}", *rules, *more])
        if calls is None or not calls.enforced or len(text.encode()) <= MAX_GRAMMAR_BYTES:
            return text, calls is not None and calls.unenforced
        # Too many arguments: calls stay unconstrained.
        calls.drop_rules()


def _rules(
    calls: _Calls | None, answer: common_pb2.Grammar | None, *, opening: str, required: bool
) -> list[str] | None:
    """Returns the rule "body" and its subrules; None without constraints."""
    if required:
        return calls.required(opening) if calls is not None else None
    if answer is None:
        return calls.in_text() if calls is not None else None
    rules = [f"answer: {_answer(answer)}"]
    if calls is None:
        return [*rules, "body: answer"]
    return [*rules, "body: answer | calls", *calls.beside_answer()]


class _Calls:
    """Grammar rules for the tool calls of one answer."""

    def __init__(
        self, model: ChatModel, tools: Tools, required_tool: str | None, *, several: bool
    ) -> None:
        self._model = model
        self._required_tool = required_tool
        self._tools: Tools = [
            tool for tool in tools if required_tool in (None, "", tool["function"]["name"])
        ]
        names = tuple(tool["function"]["name"] for tool in self._tools)
        self._names = names
        # A protocol declares no __hash__, but formats are plain objects.
        notation = notation_of(model.format, names)  # type: ignore[arg-type]
        self._arguments = (notation and self._read_arguments(notation)) or {}
        self._notation = notation if self._arguments else None
        self._several = several

    @property
    def enforced(self) -> bool:
        """True if there are rules for the arguments of these tools."""
        return self._notation is not None

    @property
    def unenforced(self) -> bool:
        """True if a strict tool's schema cannot be enforced."""
        return not self.enforced and any(map(_is_strict, self._tools))

    def drop_rules(self) -> None:
        self._notation = None

    def required(self, opening: str) -> list[str] | None:
        """Returns the rules of an answer that begins with a call; `opening` is in the prompt.

        Without rules for arguments only the rest of the format's opening is forced.
        """
        if self._model.reasoning is not None:
            opening = opening.removeprefix(self._model.reasoning.closing)
        if self._notation is not None and self._notation.opening.startswith(opening):
            return ["body: calls", *self._calls(self._notation, behind=opening)]
        rest = self._model.format.opening(self._required_tool or None).removeprefix(opening)
        return [f"body: {spelt(self._model, rest)} {_ANY_TOKENS}"] if rest else None

    def beside_answer(self) -> list[str]:
        """Returns the rules of calls that replace an answer with a response format."""
        if self._notation is not None:
            return self._calls(self._notation)
        # Calls are unconstrained; their first tag distinguishes them from an answer.
        mark = self._mark(_written(self._model.format, self._names[:1]))
        if not mark:
            raise InvalidArgument(
                "a response format is not supported together with tools: in the model's call "
                f"syntax ({self._model.format.name}) calls begin without a tag; use "
                'tool_choice "none"'
            )
        return [f"calls: {spelt(self._model, mark)} {_ANY_TEXT}"]

    def in_text(self) -> list[str] | None:
        """Returns the rules of text without call tags that calls may follow."""
        mark = self._mark(self._notation.opening) if self._notation is not None else ""
        if self._notation is None or not mark:
            return None
        tags = "|".join(lark_escaped(tag) for tag in sorted(self._model.format.marks))
        rules = self._calls(self._notation, behind=mark)
        rules.append(f"TEXT: {_ANY_TEXT} & ~/(?s:.*)({tags})(?s:.*)/")
        begin = spelt(self._model, mark)
        if begin.startswith("<"):
            return [f"body: TEXT? | TEXT? {begin} calls", *rules]
        # A tag of several tokens: a lazy terminal, because the lexer must stop at the tag.
        return ["body: TEXT? | lead calls", f"lead[lazy]: /(?s:.*){lark_escaped(mark)}/", *rules]

    def _calls(self, notation: Notation, *, behind: str = "") -> list[str]:
        """Returns the rule "calls", without the text `behind` at its beginning."""
        arguments = [f"arguments_{at}" for at in range(len(self._tools))]
        first = [
            f"{spelt(self._model, begin.removeprefix(behind))} {name}"
            for begin, name in zip(notation.first, arguments, strict=True)
        ]
        rules = [f"first: {' | '.join(first)}"]
        several = self._several and bool(notation.further)
        if several:
            further = [
                f"{spelt(self._model, between)} {name}"
                for between, name in zip(notation.further, arguments, strict=True)
            ]
            rules.append(f"further: {' | '.join(further)}")
        end = spelt(self._model, notation.end)
        rules.append(f"calls: first further* {end}" if several else f"calls: first {end}")
        for name in arguments:
            rules += self._arguments[name]
        return rules

    def _read_arguments(self, notation: Notation) -> dict[str, list[str]] | None:
        """Returns the argument rules by tool; None if a tool's rules are unknown."""
        rules_of: dict[str, list[str]] = {}
        values: dict[str, str] = {}
        for at, tool in enumerate(self._tools):
            name, strict = f"arguments_{at}", _is_strict(tool)
            if notation.one_by_one is None:
                schema = _parameters(tool) if strict else _ANY_ARGUMENTS
                rules_of[name] = [f"{name}: %json {_json(guided(schema))}"]
                continue
            arguments = Arguments(
                self._model,
                notation.one_by_one,
                self._names[at],
                _parameters(tool),
                name=name,
                values=values,
            )
            rules = arguments.rules(strict=strict)
            if rules is None:
                return None
            rules_of[name] = rules
        return rules_of

    def _mark(self, text: str) -> str:
        """Returns the first tag of calls; "" for a call syntax without one."""
        tags = [mark for mark in self._model.format.marks if text.startswith(mark)]
        return max(tags, key=len, default="")


def _written(output: OutputFormat, names: Sequence[str]) -> str:
    return output.write([CallDelta(name=name, arguments="{}") for name in names])


def _reasoning(model: ChatModel, *, inside: bool) -> str:
    """Returns the expression of the start rule: reasoning, if the model reasons, then the body."""
    if model.reasoning is None:
        return "body"
    close = spelt(model, model.reasoning.close)
    if close.startswith("<"):
        thought = f"({_ANY_TEXT})? {close} SPACE? "
    else:
        thought = "thought SPACE? "
    return f"{thought}body" if inside else f"({spelt(model, model.reasoning.open)} {thought})? body"


def _reasoning_rules(model: ChatModel) -> list[str]:
    if model.reasoning is None:
        return []
    close = lark_escaped(model.reasoning.close)
    return [r"SPACE: /[ \n]{1,8}/", f"thought[lazy]: /(?s:.*){close}/"]


def _answer(answer: common_pb2.Grammar) -> str:
    if answer.WhichOneof("kind") == "regex":
        return f"/{regex_to_lark(answer.regex, use_ascii='')}/"
    schema = _object(answer.json_schema, "sampling.grammar.json_schema")
    return f"%json {_json(guided(schema, lenient=answer.lenient))}"


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a strict tool's arguments, always of type object."""
    schema = tool["function"].get("parameters") or {}
    return {**schema, "type": "object"} if isinstance(schema, dict) else {"type": "object"}


def _object(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{field} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument(f"{field} must be a JSON object")
    return value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
