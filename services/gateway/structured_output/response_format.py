"""Converts the response format of a request to a grammar.

Owns `answer_grammar`, the only entry point for protocols, and the check of schemas.
`services.gateway.structured_output.turn_grammar` combines the grammar with the model's reasoning
and tool calls. Owns no model.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping
from typing import Any, Literal

from forge.core.errors import InvalidArgument
from forge.grammar.answer_grammar import MAX_GRAMMAR_BYTES, check_schema
from forge.v1 import common_pb2
from services.gateway.errors import InvalidField

AnswerKind = Literal["text", "json_object", "json_schema"]
ANY_OBJECT = '{"type": "object"}'
_CHECKED_SCHEMAS = 512


async def answer_grammar(
    kind: AnswerKind,
    schema: Mapping[str, Any] | None = None,
    *,
    strict: bool = False,
    field: str,
) -> common_pb2.Grammar | None:
    """Returns the value of `TurnRequest.sampling.grammar`; None for text.

    Unless `strict`, schema parts that cannot be enforced do not constrain the model. `field` is the
    schema's name in the agent's request. Raises `InvalidArgument` with the place in the schema.
    """
    if kind == "text":
        return None
    if kind == "json_object":
        return common_pb2.Grammar(json_schema=ANY_OBJECT)
    if schema is None:
        raise InvalidField(f"{field} is missing: a JSON Schema is needed", param=field)
    await check_schema_of(schema, strict=strict, field=field)
    return common_pb2.Grammar(json_schema=_spelt(schema), lenient=not strict)


async def check_schema_of(schema: Mapping[str, Any], *, strict: bool, field: str) -> None:
    """Raises `InvalidArgument` for a schema that cannot be enforced."""
    spelt = _spelt(schema)
    # Before the cache, too, so that its texts are bounded.
    size_bytes = len(spelt.encode())
    if size_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidField(
            f"{field} has {size_bytes} bytes as JSON; at most {MAX_GRAMMAR_BYTES}", param=field
        )
    # On a thread, because it may take several tenths of a second.
    problem = await asyncio.to_thread(_problem, spelt, strict)
    if problem:
        raise InvalidField(field + problem, param=field)


def _spelt(schema: Mapping[str, Any]) -> str:
    # Keys keep their order, which is the order of properties in the answer.
    try:
        return json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise InvalidArgument("the schema is nested too deeply") from None


@functools.lru_cache(maxsize=_CHECKED_SCHEMAS)
def _problem(schema_json: str, strict: bool) -> str:
    """Returns the problem of a schema, or ""; cached, because agents send equal schemas often."""
    try:
        check_schema(json.loads(schema_json), field="", lenient=not strict)
    except InvalidArgument as error:
        return str(error)
    except RecursionError:
        return " is nested too deeply"
    return ""
