"""Which turns of a trajectory are side calls: titles, summaries for a screen, probes of the model.

Rewards say nothing about them, so they are left out of training by default. Owns the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from forge.core.token_columns import TOKEN_BYTES
from forge.v1 import common_pb2 as pb

SideCall = Literal["excluded", "side_call"]
"""Why a turn is left out: its agent says so, or the rule does."""


def side_calls(turns: Sequence[pb.Turn], lengths: Sequence[int]) -> dict[int, SideCall]:
    """Side calls by turn index; `lengths` are the tokens of each turn's sequence.

    By the rule, a side call offers no tools where other turns offer some, has a system prompt of
    none of those, and no later turn continues its answer. A label of the agent decides first.
    """
    continued = {
        turn.parent_turn
        for turn in turns
        if turn.parent_turn >= 0
        and turn.prefix_tokens > lengths[turn.parent_turn] - _sampled(turns[turn.parent_turn])
    }
    systems = {turn.system_digest for turn in turns if turn.offers_tools}
    found: dict[int, SideCall] = {}
    for index, turn in enumerate(turns):
        if turn.HasField("train"):
            if not turn.train:
                found[index] = "excluded"
        elif (
            systems
            and not turn.offers_tools
            and turn.system_digest not in systems
            and index not in continued
        ):
            found[index] = "side_call"
    return found


def _sampled(turn: pb.Turn) -> int:
    return len(turn.sampled.ids) // TOKEN_BYTES
