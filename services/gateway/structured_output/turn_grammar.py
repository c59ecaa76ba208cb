"""The grammar of one turn: what an agent asked for, as this model writes it.

Owns how an answer's grammar, the tools' strict schemas and a required call fit to the model's
reasoning and to its notation of tool calls (`services.gateway.structured_output.call_syntax`; what
may stand in one that writes arguments one by one is
`services.gateway.structured_output.argument_rules`'). Knows nothing of tokens and masks.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from llguidance import regex_to_lark

from forge.core.errors import InvalidArgument
from forge.core.formats import CallDelta, OutputFormat
from forge.grammar.answer_grammar import MAX_GRAMMAR_BYTES, guided
from forge.v1 import common_pb2
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.metrics import UNENFORCED
from services.gateway.model.chat_model import ChatModel, Tools
from services.gateway.structured_output.argument_rules import Arguments
from services.gateway.structured_output.call_syntax import (
    Notation,
    lark_escaped,
    notation_of,
    spelt,
)
from services.gateway.structured_output.response_format import checked

KEPT_GRAMMARS = 64
_ANY_TEXT = "/(?s:.+)/"
_ANY_ARGUMENTS = {"type": "object"}


async def check(request: TurnRequest) -> None:
    """Raises `InvalidArgument` for what cannot be had together, and for strict tools whose schema
    cannot be enforced, naming the place in it."""
    if request.prompt_ids:
        return
    if request.sampling.HasField("grammar"):
        if request.required_tool is not None:
            raise InvalidArgument(
                "an answer cannot be in the form asked for and be the tool call that tool_choice "
                "asks for: leave one of them out"
            )
        if request.stop:
            raise InvalidArgument(
                "stop cannot be had with an answer of a given form: it would be cut off"
            )
        answer = request.sampling.grammar
        if answer.WhichOneof("kind") == "json_schema":
            field = "sampling.grammar.json_schema"
            await checked(
                _object(answer.json_schema, field), strict=not answer.lenient, field=field
            )
    if request.call_tools:
        for at, tool in enumerate(request.tools):
            if _is_strict(tool):
                await checked(
                    _parameters(tool), strict=True, field=f"tools[{at}].function.parameters"
                )


def turn_grammar(
    model: ChatModel, request: TurnRequest, *, opening: str, inside: bool
) -> common_pb2.Grammar | None:
    """What is sampled behind `opening`; `inside`: it begins with reasoning. None: anything goes."""
    answer = request.sampling.grammar if request.sampling.HasField("grammar") else None
    if request.prompt_ids or (answer is not None and answer.WhichOneof("kind") == "lark"):
        return answer
    callable_tools = request.call_tools and model.format.takes_tools and request.tools
    wanted = answer is not None or request.required_tool is not None
    # Most requests end here, and should not pay for what they do not ask for.
    if not wanted and not any(_is_strict(tool) for tool in callable_tools or ()):
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
    """The grammar's text, "" where anything goes, and whether strict tools are left to the model.

    Kept, as agents send the same tools with every call, and each argument costs some time.
    """
    tools: Tools = msgspec.json.decode(tools_json)
    calls = _Calls(model, tools, required_tool, several=several) if tools else None
    answer = common_pb2.Grammar.FromString(answer_bytes) if answer_bytes is not None else None
    while True:
        rules = _rules(calls, answer, opening=opening, required=required_tool is not None)
        if rules is None:
            return "", calls is not None and calls.unenforced
        # The opening of a required call has ended the reasoning already.
        start, more = "body", list[str]()
        if not opening:
            start, more = _reasoning(model, inside=inside), _reasoning_rules(model)
        text = "\n".join(["%llguidance {}", f"start: {start}", *rules, *more])
        if calls is None or not calls.told or len(text.encode()) <= MAX_GRAMMAR_BYTES:
            return text, calls is not None and calls.unenforced
        # Too many arguments of too many tools: the model's notation is left to the model.
        calls.give_up()


def _rules(
    calls: _Calls | None, answer: common_pb2.Grammar | None, *, opening: str, required: bool
) -> list[str] | None:
    """The rule "body" and those below it; None: anything goes."""
    if required:
        return calls.required(opening) if calls is not None else None
    if answer is None:
        return calls.in_text() if calls is not None else None
    rules = [f"answer: {_answer(answer)}"]
    if calls is None:
        return [*rules, "body: answer"]
    return [*rules, "body: answer | calls", *calls.beside_answer()]


class _Calls:
    """The tool calls of one answer as rules of a grammar."""

    def __init__(
        self, model: ChatModel, tools: Tools, required_tool: str | None, *, several: bool
    ) -> None:
        self._model = model
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
    def told(self) -> bool:
        """Whether there are rules for the arguments of these tools."""
        return self._notation is not None

    @property
    def unenforced(self) -> bool:
        """Whether some of them are strict in vain."""
        return not self.told and any(map(_is_strict, self._tools))

    def give_up(self) -> None:
        self._notation = None

    def required(self, opening: str) -> list[str] | None:
        """Rules for an answer that begins with a call, whose `opening` is the prompt's already."""
        if self._model.reasoning is not None:
            opening = opening.removeprefix(self._model.reasoning.closing)
        if self._notation is None or not self._notation.opening.startswith(opening):
            return None
        return ["body: calls", *self._calls(self._notation, behind=opening)]

    def beside_answer(self) -> list[str]:
        """Rules for calls in the place of an answer of a given form."""
        if self._notation is not None:
            return self._calls(self._notation)
        # Held to nothing, but told from an answer by the tag they begin with.
        mark = self._mark(_written(self._model.format, self._names[:1]))
        if not mark:
            raise InvalidArgument(
                f"an answer of a given form cannot be had beside tools: in the model's notation of "
                f"calls ({self._model.format.name}) nothing tells the beginning of a call; use "
                'tool_choice "none"'
            )
        return [f"calls: {spelt(self._model, mark)} {_ANY_TEXT}"]

    def in_text(self) -> list[str] | None:
        """Rules for text behind which calls may follow, and in which nothing looks like one."""
        mark = self._mark(self._notation.opening) if self._notation is not None else ""
        if self._notation is None or not mark:
            return None
        told = "|".join(lark_escaped(each) for each in sorted(self._model.format.marks))
        rules = self._calls(self._notation, behind=mark)
        rules.append(f"TEXT: {_ANY_TEXT} & ~/(?s:.*)({told})(?s:.*)/")
        begin = spelt(self._model, mark)
        if begin.startswith("<"):
            return [f"body: TEXT? | TEXT? {begin} calls", *rules]
        # As text, the tag ends the text before it: the lexer must not read on over it.
        return ["body: TEXT? | lead calls", f"lead[lazy]: /(?s:.*){lark_escaped(mark)}/", *rules]

    def _calls(self, notation: Notation, *, behind: str = "") -> list[str]:
        """The rule "calls", less the text `behind` at its beginning."""
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
        """The rules for each tool's arguments; None where some tool's cannot be told."""
        found: dict[str, list[str]] = {}
        values: dict[str, str] = {}
        for at, tool in enumerate(self._tools):
            name, strict = f"arguments_{at}", _is_strict(tool)
            if notation.one_by_one is None:
                schema = _parameters(tool) if strict else _ANY_ARGUMENTS
                found[name] = [f"{name}: %json {_json(guided(schema))}"]
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
            found[name] = rules
        return found

    def _mark(self, text: str) -> str:
        """The tag that calls begin with; "" for a notation without one."""
        found = [mark for mark in self._model.format.marks if text.startswith(mark)]
        return max(found, key=len, default="")


def _written(output: OutputFormat, names: Sequence[str]) -> str:
    return output.write([CallDelta(name=name, arguments="{}") for name in names])


def _reasoning(model: ChatModel, *, inside: bool) -> str:
    """The start rule's expression: the body, behind what the model thinks first, if it does."""
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
    """The schema of a strict tool's arguments, which are an object whatever it says."""
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
