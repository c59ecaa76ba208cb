"""Random tool calls, schemas that type their arguments, and texts that look like calls.

Owns what the format tests share. Calls are made together with the tools they belong to, because
formats without types read arguments by the schema. All is drawn from a `Random`: properties are
tried on many seeds, which is far cheaper than to draw such values one by one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

from forge.core.formats import (
    CallDelta,
    Delta,
    OutputFormat,
    ParsedAnswer,
    Parser,
    ReasoningDelta,
    TextDelta,
    Tools,
    collect,
)
from forge.core.formats.registry import BUILT_IN

CALLING = sorted(name for name in BUILT_IN if BUILT_IN[name]().takes_tools)
"""Formats that write calls."""
NAMES = ["look", "get_weather", "a"]
TEXTS = ["", "a", " b ", "\n", "1", "true", '"', "é日🙂", "\\", "{}", "it's", "Observation:", "```"]

TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def all_marks(output: OutputFormat) -> list[str]:
    """Tags of a format, whole and in halves."""
    tags = sorted(
        {*output.marks, *getattr(output, "inner", ()), *output.opening("look").split("\n")}
    )
    return [*tags, *(tag[: len(tag) // 2] for tag in tags), *(tag[len(tag) // 2 :] for tag in tags)]


def some_text(random: Random, output: OutputFormat) -> str:
    choices = [*TEXTS, *all_marks(output)]
    return "".join(random.choice(choices) for _ in range(random.choice((0, 1, 1, 2, 3))))


def some_value(random: Random, output: OutputFormat, *, depth: int = 2) -> Any:
    kind = random.randrange(8 if depth else 6)
    if kind < 2:
        return some_text(random, output)
    if kind < 6:
        return random.choice(
            [None, True, False, random.randrange(-(10**20), 10**20), 0, 1.5, -0.1, 1e300, 7]
        )
    inner = [some_value(random, output, depth=depth - 1) for _ in range(random.randrange(3))]
    return inner if kind == 6 else {some_text(random, output): value for value in inner}


def some_calls(random: Random, output: OutputFormat) -> tuple[list[CallDelta], Tools]:
    """One to three calls, of tools whose schemas allow exactly the types of their arguments.

    What the format cannot tell from its own tags is not in them: nothing is escaped.
    """
    calls: list[CallDelta] = []
    tools: list[dict[str, Any]] = []
    while not calls or not writable(output, calls):
        calls, tools = [], []
        for name in random.sample(NAMES, random.choice((1, 1, 2, 3))):
            keys = random.sample(["at", "x_1", "parameters"], random.randrange(3))
            arguments = {key: some_value(random, output) for key in keys}
            properties = {key: {"type": TYPES[type(value)]} for key, value in arguments.items()}
            parameters = {"type": "object", "properties": properties}
            calls.append(CallDelta(name=name, arguments=json.dumps(arguments, ensure_ascii=False)))
            tools.append({"type": "function", "function": {"name": name, "parameters": parameters}})
    return calls, tools


def some_mess(random: Random, output: OutputFormat) -> str:
    """Text of tags, halves of tags, words and whole calls in any order."""
    parts = [*all_marks(output), "\n", " ", "Sure.", "<", "<think>", "</think>"]
    parts += [output.write(some_calls(random, output)[0]) for _ in range(len(parts) // 2)]
    return "".join(random.choice(parts) for _ in range(random.randrange(7)))


def cut_up(random: Random, text: str) -> list[str]:
    """The text in pieces of any length."""
    pieces: list[str] = []
    while text:
        size = random.choice((1, 2, 3, 5, 9, 40))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def writable(output: OutputFormat, calls: Sequence[CallDelta]) -> bool:
    """False for arguments that the format cannot tell from its own tags: nothing is escaped."""
    begin, end = getattr(output, "argument_begin", ""), getattr(output, "argument_end", "")
    if not begin:
        return True
    inside = "".join(call.arguments for call in calls)
    closing = ("</function>", "</invoke>", end, begin, "<arg_key>")
    return not any(tag in inside for tag in closing)


def read(parser: Parser, pieces: Sequence[str]) -> tuple[ParsedAnswer, list[Delta]]:
    """The answer, and its deltas with neighbors of one kind joined."""
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if isinstance(last, TextDelta) and isinstance(delta, TextDelta):
            joined[-1] = TextDelta(text=last.text + delta.text)
        elif isinstance(last, ReasoningDelta) and isinstance(delta, ReasoningDelta):
            joined[-1] = ReasoningDelta(text=last.text + delta.text)
        else:
            joined.append(delta)
    return collect(deltas, parser.error), joined


def said(calls: Sequence[CallDelta]) -> list[tuple[str, Any]]:
    """Names and arguments, as far as two spellings of them can be compared."""
    return [(call.name, json.loads(call.arguments)) for call in calls]
