"""Rebases the waiting turns of a session on the stored trajectory.

Owns the rule for two gateways in one session: the order of the pool is authoritative. If another
gateway used the number of a turn, the turn is recorded again after all stored ones: same prompt and
sample, new number and parent. Pure: no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from forge.core.conversation.context_tree import root_of
from forge.core.errors import DataLoss
from forge.v1 import common_pb2
from services.gateway.conversation.conversation import Conversation
from services.gateway.conversation.handles import Handle
from services.gateway.conversation.other_turns import append_other
from services.gateway.conversation.prompt import Place, Prompt, PromptDraft, SampledAnswer
from services.gateway.model.chat_model import ChatModel


def rebase(
    model: ChatModel,
    stored: Sequence[common_pb2.Turn],
    waiting: Sequence[common_pb2.Turn],
) -> tuple[Conversation, list[common_pb2.Turn]]:
    """Returns the conversation with all turns, and the turns that are not stored, renumbered.

    `waiting`: the turns without an acknowledgement, in order; some may be stored already. Raises
    `DataLoss` if acknowledged turns are missing.
    """
    unstored = [turn for turn in waiting if not _is_stored(turn, stored)]
    conversation = _restored(model, stored)
    if not unstored:
        return conversation, []
    first = unstored[0].turn_index
    if first > len(stored):
        raise DataLoss(
            f"{unstored[0].trajectory_id} has {len(stored)} turns in the pool, but turn "
            f"{first - 1} was acknowledged"
        )
    if first == len(stored):
        for turn in unstored:
            _restore(conversation, turn)
        return conversation, unstored
    # One turn of a trajectory is sent at a time, so the turns before `first` are stored as sent.
    local = _restored(model, [*stored[:first], *unstored])
    return conversation, [_recorded(turn, local, conversation) for turn in unstored]


def _is_stored(turn: common_pb2.Turn, stored: Sequence[common_pb2.Turn]) -> bool:
    return turn.turn_index < len(stored) and stored[turn.turn_index] == turn


def _restored(model: ChatModel, turns: Sequence[common_pb2.Turn]) -> Conversation:
    conversation = Conversation(model=model)
    for turn in turns:
        _restore(conversation, turn)
    return conversation


def _restore(conversation: Conversation, turn: common_pb2.Turn) -> None:
    if turn.HasField("other_model"):
        append_other(conversation, turn)
    else:
        conversation.restore(turn)


def _recorded(turn: common_pb2.Turn, source: Conversation, target: Conversation) -> common_pb2.Turn:
    """Records a turn of `source` in `target`."""
    if turn.HasField("other_model"):
        moved = common_pb2.Turn()
        moved.CopyFrom(turn)
        append_other(target, moved)
        moved.ClearField("turns_before")
        return moved
    node = source.nodes[turn.turn_index]
    ids = source.prefixes.prompt(turn.turn_index)
    place, opening = None, ""
    if node is not None and node.parent is not None:
        place, opening = Place(root=root_of(node), node=node.parent, beyond=()), node.opening
    sampled = SampledAnswer(
        columns=turn.sampled,
        finish_reason=turn.finish_reason,
        answer=node.message if node is not None else None,
        parse_error=turn.parse_error,
        cached_tokens=turn.cached_tokens,
    )
    draft = PromptDraft(how="rebased", ids=ids, place=place, opening=opening)
    context = json.loads(turn.messages_json or "{}")
    rebased = target.record(Prompt(ids=ids, draft=draft), sampled, _handle(context))
    result = common_pb2.Turn()
    result.CopyFrom(turn)
    result.turn_index, result.parent_turn = rebased.turn_index, rebased.parent_turn
    result.prefix_tokens, result.prompt_ids = rebased.prefix_tokens, rebased.prompt_ids
    result.messages_json = rebased.messages_json
    # It counted turns of this gateway only, not those of the session.
    result.ClearField("turns_before")
    return result


def _handle(context: Mapping[str, Any]) -> Handle | None:
    for name, facts in context.get("handle", {}).items():
        return Handle(name=name, facts=facts)
    return None
