"""The tokens of one turn's sequence, in columns, part by part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from forge.client.stored.trajectory_tree import TrajectoryTree, sampled_tokens
from forge.core.errors import InvalidArgument, NotFound
from forge.core.token_columns import TOKEN_BYTES, float32_array, int32_array
from forge.v1 import common_pb2 as pb
from services.console.data.trajectories.token_texts import TokenTexts

MOST_TOKENS = 20_000
"""Tokens of one answer."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive tokens of a sequence: prompt or sampled tokens of one turn."""

    turn: pb.Turn
    sampled: bool
    tokens: int
    """From the beginning of the turn's column."""


def token_rows(
    one: pb.Trajectory, turn_index: int, texts: TokenTexts, *, first: int, count: int
) -> dict[str, Any]:
    """Columns of `count` tokens of a turn's sequence, from `first` on. Prompt tokens have neither
    log-prob nor version, and turn -1. Raises `NotFound` for an unknown turn, `InvalidArgument` for
    another count or if the turns form no tree."""
    ids: list[int] = []
    logprobs: list[float | None] = []
    versions: list[int] = []
    turns: list[int] = []
    pieces = _checked(one, turn_index, count)
    for piece, low, high in _within(pieces, first, count):
        part = slice(low * TOKEN_BYTES, high * TOKEN_BYTES)
        sampled = piece.turn.sampled
        if piece.sampled:
            ids += int32_array(sampled.ids[part])
            logprobs += [round(each, 4) for each in float32_array(sampled.logprobs[part])]
            versions += int32_array(sampled.weight_versions[part])
            turns += [piece.turn.turn_index] * (high - low)
        else:
            ids += int32_array(piece.turn.prompt_ids[part])
            logprobs += [None] * (high - low)
            versions += [-1] * (high - low)
            turns += [-1] * (high - low)
    return {
        "first": first,
        "total": sum(piece.tokens for piece in pieces),
        "ids": ids,
        "texts": [texts.of(each) for each in ids] if texts.known else None,
        "logprobs": logprobs,
        "versions": versions,
        "turns": turns,
    }


def spans_of(
    one: pb.Trajectory, turn_index: int, *, first: int, count: int
) -> Iterator[tuple[int, int, int]]:
    """The parts of `token_rows`: turn (-1 for prompt tokens), and the range among the turn's
    sampled, or prompt, tokens. Raises like `token_rows`."""
    for piece, low, high in _within(_checked(one, turn_index, count), first, count):
        yield piece.turn.turn_index if piece.sampled else -1, low, high


def _checked(one: pb.Trajectory, turn_index: int, count: int) -> list[_Piece]:
    if not 0 <= turn_index < len(one.turns):
        raise NotFound(f"{one.trajectory_id} has no turn {turn_index}")
    if not 1 <= count <= MOST_TOKENS:
        raise InvalidArgument(f"count = {count} must be 1 to {MOST_TOKENS}")
    TrajectoryTree(one.turns)
    return _pieces(one.turns, turn_index)


def _within(pieces: Iterable[_Piece], first: int, count: int) -> Iterator[tuple[_Piece, int, int]]:
    """The pieces in a range of the sequence, each with its own range."""
    at = 0
    for piece in pieces:
        low, high = max(first - at, 0), min(first + count - at, piece.tokens)
        at += piece.tokens
        if low < high:
            yield piece, low, high


def _pieces(turns: Sequence[pb.Turn], index: int) -> list[_Piece]:
    """The sequence of a turn: parts of its ancestors, then its own."""
    pieces: list[_Piece] = []
    turn = turns[index]
    tokens = turn.prefix_tokens + len(turn.prompt_ids) // TOKEN_BYTES + sampled_tokens(turn)
    while tokens > 0:
        turn = turns[index]
        prompt = len(turn.prompt_ids) // TOKEN_BYTES
        own = tokens - turn.prefix_tokens
        if own > prompt:
            pieces.append(_Piece(turn, True, own - prompt))
        if own > 0 and prompt:
            pieces.append(_Piece(turn, False, min(own, prompt)))
        tokens = min(tokens, turn.prefix_tokens)
        index = turn.parent_turn
    return pieces[::-1]
