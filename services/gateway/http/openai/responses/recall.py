"""Earlier responses of a session: their conversation, and their objects.

The conversation of a `previous_response_id` comes from the session's own turns. So it lives as long
as the session, in any gateway, and is unknown in other sessions. A response with `store: false` is
known to its own WebSocket connection only, until the next response there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from forge.core.conversation.messages import Message
from services.gateway.actors.messages import Recall
from services.gateway.conversation.handles import Recalled
from services.gateway.conversation.prefix_match import NamedPrefix
from services.gateway.errors import InvalidField, UnknownPreviousResponse
from services.gateway.http.edge import Edge
from services.gateway.http.openai.responses.history import history_of, items_of, messages_of
from services.gateway.http.openai.responses.items import (
    Head,
    Item,
    ending,
    key_of_item,
    output_of,
    response_key,
    usage,
)
from services.gateway.http.openai.responses.schema import ResponsesRequest
from services.gateway.http.openai.responses.tools import ToolName, responses_tools
from services.gateway.model.chat_model import ChatModel
from services.gateway.sessions import Session
from services.gateway.turns.record import ASK_TIMEOUT_S


async def conversation_of(
    session: Session, asked: ResponsesRequest, edge: Edge, *, known: Collection[str]
) -> Sequence[Message]:
    """Returns the complete conversation: instructions, earlier messages, new messages. `known` are
    keys of responses that are known here although they are not stored.

    Raises `UnknownPreviousResponse`, and `InvalidArgument` for an item that is not found.
    """
    raw = bytes(asked.input)
    if not asked.previous_response_id and b"item_reference" not in raw:
        return history_of(raw, asked.instructions, edge.images)
    items = await _dereferenced(session, items_of(raw), edge.turns.model, known)
    new = messages_of(items, edge.images)
    before: Sequence[Message] = ()
    if asked.previous_response_id:
        recalled = await recall(session, response_key(asked.previous_response_id), known=known)
        if recalled is None:
            raise UnknownPreviousResponse(
                f"Previous response with id {asked.previous_response_id[:100]!r} not found."
            )
        if _instructions(recalled) == (asked.instructions or None):
            return NamedPrefix(recalled.node, new)
        # Instructions apply to one response only; each request sends its own.
        before = recalled.node.messages()[int(recalled.turn.facts["instructed"]) :]
    instructions = (
        [Message(role="system", content=asked.instructions)] if asked.instructions else []
    )
    return [*instructions, *before, *new]


async def recall(session: Session, key: str, *, known: Collection[str] = ()) -> Recalled | None:
    """Returns the turn of a response; None for an unknown one, and for one that is not stored
    unless `known` has its key."""
    found: Recalled | None = await session.actor.ask(Recall(name=key), timeout_s=ASK_TIMEOUT_S)
    if found is None or (key not in known and not found.turn.facts.get("stored", True)):
        return None
    return found


def stored_response(recalled: Recalled, key: str, model: ChatModel) -> dict[str, Any]:
    """Returns the response object of an earlier turn."""
    turn, answer = recalled.turn, recalled.node.messages()[-1]
    # Turns of earlier releases have no names.
    names = {
        flat: ToolName(name=name, namespace=namespace, custom=custom)
        for flat, (name, namespace, custom) in turn.facts.get("names", {}).items()
    }
    head = Head(
        key=key,
        created_at=turn.facts["created_at"],
        model=turn.facts.get("model", model.name),
        instructions=_instructions(recalled),
        tools=responses_tools(recalled.tools, names),
        names=names,
        echoed=turn.facts["echoed"],
    )
    status, details = ending(turn.finish_reason)
    spent = usage(
        prompt_tokens=recalled.prompt_tokens,
        cached_tokens=turn.cached_tokens,
        sampled_tokens=recalled.sampled_tokens,
        reasoning_tokens=model.reasoning_tokens(answer, recalled.sampled_ids),
    )
    return head.response(status, output_of(head, answer, status), usage=spent, **details)


async def _dereferenced(
    session: Session, items: str | Sequence[Item], model: ChatModel, known: Collection[str]
) -> str | list[Item]:
    """Replaces every `item_reference` of the input by the output item with its id."""
    if isinstance(items, str):
        return items
    outputs: dict[str, dict[str, Item]] = {}
    dereferenced = []
    for at, item in enumerate(items):
        if item.get("type") == "item_reference":
            item_id = str(item.get("id"))
            key = key_of_item(item_id) or ""
            if key not in outputs:
                recalled = await recall(session, key, known=known)
                output = stored_response(recalled, key, model)["output"] if recalled else ()
                outputs[key] = {kept["id"]: kept for kept in output}
            if item_id not in outputs[key]:
                raise InvalidField(
                    f"input[{at}]: item with id {item_id[:100]!r} not found", param=f"input[{at}]"
                )
            item = outputs[key][item_id]
        dereferenced.append(item)
    return dereferenced


def _instructions(recalled: Recalled) -> str | None:
    """Returns the instructions of a response."""
    instructed = recalled.turn.facts["instructed"]
    return recalled.node.messages()[0].content if instructed else None
