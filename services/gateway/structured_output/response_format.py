"""What an agent asks an answer to look like, as the grammar of a turn.

Owns the one hook that protocols use, `answer_grammar`;
`services.gateway.structured_output.turn_grammar` fits what it gives to the model's reasoning and
tool calls. Knows no model.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping
from typing import Any, Literal

from forge.core.errors import InvalidArgument
from forge.grammar.answer_grammar import check_schema
from forge.v1 import common_pb2

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
    """What goes into `TurnRequest.sampling.grammar`; None for text.

    Not `strict`, what of the schema cannot be enforced is left to the model. `field` is the
    schema's name in the agent's request. Raises `InvalidArgument` naming the place in it.
    """
    if kind == "text":
        return None
    if kind == "json_object":
        return common_pb2.Grammar(json_schema=ANY_OBJECT)
    if schema is None:
        raise InvalidArgument(f"{field} is missing: a JSON Schema is needed")
    await checked(schema, strict=strict, field=field)
    return common_pb2.Grammar(json_schema=_spelt(schema), lenient=not strict)


async def checked(schema: Mapping[str, Any], *, strict: bool, field: str) -> None:
    """Raises `InvalidArgument` for a schema that no answer can be held to."""
    # On a thread, for it may take a good part of a second.
    wrong = await asyncio.to_thread(_wrong, _spelt(schema), strict)
    if wrong:
        raise InvalidArgument(field + wrong)


def _spelt(schema: Mapping[str, Any]) -> str:
    # In the order given: it is the order in which properties are written.
    try:
        return json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise InvalidArgument("the schema is nested too deeply") from None


@functools.lru_cache(maxsize=_CHECKED_SCHEMAS)
def _wrong(schema_json: str, strict: bool) -> str:
    """ "" or what is wrong, kept: agents send the same schemas with every call."""
    try:
        check_schema(json.loads(schema_json), field="", lenient=not strict)
    except InvalidArgument as error:
        return str(error)
    except RecursionError:
        return " is nested too deeply"
    return ""
