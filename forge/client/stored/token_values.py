"""Reads the values of single trained tokens from the trainer.

Owns joining the pieces of a turn. Values that the trainer has not stored are absent, never 0.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterable
from dataclasses import dataclass, field

from forge.core.errors import DataLoss
from forge.core.token_columns import float32_array
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.streams import flowing
from forge.v1 import trainer_pb2 as pb
from forge.v1.trainer_pb2_grpc import TrainerServiceStub

CLIPPED = 1
"""Flag: the importance ratio exceeds a bound of the loss."""
MASKED = 2
"""Flag: the off-policy correction masks the token."""
COLUMNS = ("logprobs", "log_ratios", "entropies", "advantages")


def _floats() -> array[float]:
    return array("f")


@dataclass(slots=True, kw_only=True)
class TurnValues:
    """Values of a turn's sampled tokens, as the trainer computed them before its step."""

    step: int
    """Optimizer step that trained the turn."""
    weight_version: int
    """Version of the weights that computed the values."""
    logprobs: array[float] = field(default_factory=_floats)
    log_ratios: array[float] = field(default_factory=_floats)
    """Logs of the importance ratio pi / pi_behavior."""
    entropies: array[float] = field(default_factory=_floats)
    """Nats."""
    advantages: array[float] = field(default_factory=_floats)
    flags: bytearray = field(default_factory=bytearray)
    """Flags of each token: CLIPPED + MASKED."""


class TokenValuesReader:
    """A connection to the trainer."""

    def __init__(
        self, coordinator: Coordinator, channels: Channels, *, timeout_s: float = 10.0
    ) -> None:
        """`timeout_s` is the deadline of a read."""
        self._trainer = Remote(coordinator, channels, kind="trainer", stub=TrainerServiceStub)
        self._timeout_s = timeout_s

    async def read(self, trajectory_id: str) -> dict[int, TurnValues]:
        """Return the stored values of a trajectory by turn. Raises `NotFound` without any, and
        `Unavailable` without a trainer."""
        _, stub = await self._trainer.pick(timeout_s=self._timeout_s)
        call = stub.FetchTokenValues(
            pb.FetchTokenValuesRequest(trajectory_id=trajectory_id), timeout=self._timeout_s
        )
        try:
            return await joined(
                flowing(call, silence_s=self._timeout_s, source="the trainer"),
            )
        finally:
            call.cancel()


async def joined(pieces: AsyncIterable[pb.FetchTokenValuesResponse]) -> dict[int, TurnValues]:
    """Return the values of turns from their pieces. Raises `DataLoss` for a gap."""
    turns: dict[int, TurnValues] = {}
    async for piece in pieces:
        turn = turns.setdefault(
            piece.turn_index, TurnValues(step=piece.step, weight_version=piece.weight_version)
        )
        if piece.first != len(turn.flags):
            raise DataLoss(
                f"turn {piece.turn_index}: values from token {piece.first} on after "
                f"{len(turn.flags)} tokens"
            )
        for name in COLUMNS:
            getattr(turn, name).extend(float32_array(getattr(piece, name)))
        turn.flags += piece.flags
    return turns
