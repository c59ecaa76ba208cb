"""One trajectory: its tree and its turns with their messages."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from forge.client.stored.trajectory_tree import TrajectoryTree, sampled_tokens
from forge.core.enum_words import enum_word
from forge.core.token_columns import float32_array, int32_array
from forge.v1 import common_pb2 as pb
from services.console.data.trajectories.rows import facts

MOST_CHARACTERS = 200_000
"""Characters of one message; the rest is left out, and counted."""


def trajectory_row(one: pb.Trajectory, advantages: Sequence[float] | None) -> dict[str, Any]:
    """The whole trajectory without its tokens. Raises `InvalidArgument` if it is no tree."""
    tree = TrajectoryTree(one.turns)
    turns = [_turn_row(turn, tree) for turn in one.turns]
    for row, advantage in zip(turns, advantages or (), strict=False):
        row["advantage"] = advantage
    return facts(one) | {"branches": tree.branches, "turns": turns}


def _turn_row(turn: pb.Turn, tree: TrajectoryTree) -> dict[str, Any]:
    index = turn.turn_index
    versions = int32_array(turn.sampled.weight_versions)
    logprobs = float32_array(turn.sampled.logprobs)
    timings = turn.timings
    return {
        "index": index,
        "parent": turn.parent_turn,
        "shared": turn.prefix_tokens,
        "context": tree.contexts[index],
        "length": tree.lengths[index],
        "sampled": sampled_tokens(turn),
        "cached": turn.cached_tokens,
        "finish": enum_word(pb.FinishReason, turn.finish_reason),
        "versions": [min(versions, default=-1), max(versions, default=-1)],
        "mean_logprob": math.fsum(logprobs) / len(logprobs) if logprobs else None,
        "temperature": round(turn.temperature, 4),
        "timings": [timings.queue_s, timings.prefill_s, timings.decode_s, timings.agent_s],
        "started": turn.started_unix_s,
        "agent": turn.agent,
        "action": turn.context_action,
        "parse_error": turn.parse_error[:MOST_CHARACTERS],
        "aside": tree.aside.get(index, ""),
        "other_model": turn.other_model.name if turn.HasField("other_model") else "",
        "messages": messages_of(turn.messages_json),
        "advantage": None,
    }


def messages_of(recorded: str) -> list[dict[str, Any]]:
    """The new messages of a turn and its answer, as texts."""
    try:
        context = json.loads(recorded) if recorded else {}
    except ValueError:
        return [_message({"role": "unreadable", "content": recorded})]
    if not isinstance(context, Mapping):
        return []
    found = [_message(one) for one in _objects(context.get("messages"))]
    if isinstance(context.get("answer"), Mapping):
        found.append(_message(context["answer"]) | {"answer": True})
    # Of an external API: texts in its protocol.
    found += [
        _message({"role": part, "content": context[part]})
        for part in ("request", "response")
        if part in context
    ]
    return found


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "role": str(message.get("role", "")),
        "name": str(message.get("name") or message.get("tool_call_id") or ""),
        "content": _text(message.get("content")),
        "reasoning": _text(message.get("reasoning_content") or message.get("reasoning")),
        "calls": [_call(call) for call in _objects(message.get("tool_calls"))],
    }


def _call(call: Mapping[str, Any]) -> dict[str, str]:
    function = call.get("function")
    function = function if isinstance(function, Mapping) else call
    return {
        "name": str(function.get("name", "")),
        "arguments": _text(function.get("arguments")),
    }


def _objects(parts: Any) -> list[Mapping[str, Any]]:
    """The objects of a list; none of anything else."""
    return [one for one in parts if isinstance(one, Mapping)] if isinstance(parts, list) else []


def _text(content: Any) -> str:
    if content is None:
        return ""
    plain = isinstance(content, str)
    text = content if plain else json.dumps(content, ensure_ascii=False, indent=1)
    rest = len(text) - MOST_CHARACTERS
    return text if rest <= 0 else f"{text[:MOST_CHARACTERS]}\n… {rest} more characters"
