"""Guided decoding in the parameters of vLLM: `guided_*` and `structured_outputs`.

Owns their conversion to the grammar of an answer. They are enforced completely, or refused.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from forge.core.errors import InvalidArgument
from forge.grammar.answer_grammar import MAX_GRAMMAR_BYTES
from forge.v1 import common_pb2
from services.gateway.errors import InvalidField
from services.gateway.http.request_fields.reshaping import Reshaping
from services.gateway.structured_output.response_format import answer_grammar

_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")
MAX_CHOICES = 1000


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """`structured_outputs`."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Guided(Reshaping):
    """The fields of a request that constrain its answer, by a grammar or token by token."""

    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    structured_outputs: StructuredOutputs | None = None


async def guided_grammar_of(request: Guided) -> common_pb2.Grammar | None:
    """Returns the grammar of an answer; None without guided decoding.

    Raises `InvalidArgument` for several at once, and for one that cannot be enforced.
    """
    inner = request.structured_outputs or StructuredOutputs()
    prefix = "structured_outputs."
    given = {
        "guided_json": request.guided_json,
        "guided_regex": request.guided_regex,
        "guided_choice": request.guided_choice,
        "guided_grammar": request.guided_grammar,
        "guided_json_object": request.guided_json_object or None,
        f"{prefix}json": inner.json,
        f"{prefix}regex": inner.regex,
        f"{prefix}choice": inner.choice,
        f"{prefix}grammar": inner.grammar,
        f"{prefix}json_object": inner.json_object or None,
    }
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) > 1:
        raise InvalidArgument(f"{' and '.join(named)} exclude each other")
    for name, value in named.items():
        return await _grammar(name, value)
    return None


async def _grammar(name: str, value: Any) -> common_pb2.Grammar | None:
    match name.removeprefix("guided_").removeprefix("structured_outputs."):
        case "json":
            schema = value if isinstance(value, dict) else _schema(name, value)
            return await answer_grammar("json_schema", schema, strict=True, field=name)
        case "json_object":
            return await answer_grammar("json_object", field=name)
        case "regex":
            return common_pb2.Grammar(regex=value)
        case "choice":
            return common_pb2.Grammar(regex=any_of(name, value))
        case _:
            return common_pb2.Grammar(lark=await asyncio.to_thread(_lark, name, value))


def _schema(name: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidField(f"{name} is not a JSON Schema: {error}", param=name) from None


def any_of(name: str, choices: list[str]) -> str:
    """Returns the regular expression of several texts; raises `InvalidArgument` for too many."""
    if not 0 < len(choices) <= MAX_CHOICES:
        raise InvalidField(
            f"{name} has {len(choices)} texts; 1 to {MAX_CHOICES} are allowed", param=name
        )
    return "|".join(_META.sub(r"\\\g<0>", choice) for choice in choices)


def _lark(name: str, text: str) -> str:
    """Returns a grammar in llguidance's Lark; `text` is that, or GBNF."""
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidField(f"{name} is longer than {MAX_GRAMMAR_BYTES} bytes", param=name)
    try:
        return str(any_to_lark(text))
    # The converter raises plain exceptions too: "No 'root' rule found".
    except Exception as error:
        raise InvalidField(f"{name} is neither Lark nor GBNF: {error}", param=name) from None
