"""Turns of other models than the policy: in the order of the trajectory, outside of its token tree.

Owns their records. They have no token columns, since the columns of a trajectory are those of the
policy alone: no prompt shares a prefix with them, and nothing of them is trained.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec

from forge.core.conversation.context_tree import ContextTree
from forge.core.conversation.messages import Message, from_openai, to_openai
from forge.core.trajectory import NO_PARENT
from forge.v1 import common_pb2
from services.gateway.conversation.conversation import TURN_BYTES, Conversation
from services.gateway.conversation.handles import Handle, NamedTurn, Recalled
from services.gateway.conversation.prompt import Prompt, SampledAnswer
from services.gateway.conversation.turn_record import record_sampling
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.model.other_model import OtherModel


def append_other(conversation: Conversation, turn: common_pb2.Turn) -> int:
    """Adds a turn of another model to a conversation; sets and returns its index."""
    turn.turn_index = conversation.prefixes.append_nothing()
    turn.parent_turn = NO_PARENT
    conversation.nodes.append(None)
    conversation.size_bytes += TURN_BYTES
    if '"handle":' in turn.messages_json:
        _store_names(conversation, turn)
    return turn.turn_index


def _store_names(conversation: Conversation, turn: common_pb2.Turn) -> None:
    context = json.loads(turn.messages_json)
    if "handle" not in context:
        return
    # A tree of its own: no prompt of the policy may match these messages.
    tree = ContextTree()
    root = tree.root_of_tools(context.get("tools", []))
    after = tree.extend(root, [from_openai(plain) for plain in context["messages"]])
    node = tree.answer(after, from_openai(context["answer"]), turn=turn.turn_index)
    conversation.size_bytes += len(turn.messages_json)
    for name, facts in context["handle"].items():
        named = NamedTurn(
            turn_index=turn.turn_index,
            facts=facts,
            finish_reason=turn.finish_reason,
            cached_tokens=turn.cached_tokens,
        )
        recalled = Recalled(
            turn=named,
            node=node,
            tools=context.get("tools", []),
            prompt_tokens=turn.other_model.prompt_tokens,
            sampled_ids=b"",
            other_tokens=turn.other_model.sampled_tokens,
        )
        conversation.named_turns[name] = replace(named, of_other=recalled)


def answered_turn(
    other: OtherModel, request: TurnRequest, prompt: Prompt, sampled: SampledAnswer
) -> common_pb2.Turn:
    """Returns the record of an answer of this cluster's engines, without the session's fields."""
    answer = sampled.answer or Message(role="assistant", content=other.model.decode(sampled.ids))
    turn = common_pb2.Turn(
        finish_reason=sampled.finish_reason,
        timings=sampled.timings,
        cached_tokens=sampled.cached_tokens,
        parse_error=sampled.parse_error,
        messages_json=_messages_json(
            request, answer, other.recorded_bytes, _handle(request, sampled)
        ),
        other_model=common_pb2.OtherModel(
            name=other.name,
            kind=other.kind,
            prompt_tokens=prompt.tokens,
            sampled_tokens=sampled.tokens,
        ),
        context_action=request.context_action,
        agent=request.labels.agent,
    )
    record_sampling(turn, request)
    return turn


def _handle(request: TurnRequest, sampled: SampledAnswer) -> Handle | None:
    aborted = sampled.finish_reason == common_pb2.FINISH_REASON_ABORTED
    return None if aborted or sampled.answer is None else request.handle


def _messages_json(
    request: TurnRequest, answer: Message, most_bytes: int, handle: Handle | None
) -> str:
    """Returns the last messages that fit into `most_bytes`, and the answer; with the name of the
    turn if all fit.

    The whole request comes with each call: without a limit a long conversation with another model
    would be stored again for each of its turns.
    """
    kept: list[msgspec.Raw] = []
    messages, room = request.messages, most_bytes
    for at in range(len(messages) - 1, -1, -1):
        encoded = msgspec.json.encode(to_openai(messages[at]))
        room -= len(encoded)
        if room < 0:
            break
        kept.append(msgspec.Raw(encoded))
    record: dict[str, Any] = {"messages": kept[::-1], "answer": to_openai(answer)}
    if len(kept) < len(messages):
        record["omitted_messages"] = len(messages) - len(kept)
    elif handle is not None:
        record |= {"tools": request.tools, "handle": {handle.name: handle.facts}}
    return msgspec.json.encode(record).decode()
