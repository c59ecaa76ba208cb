"""Replays recorded experts in the passes of one policy, and counts where they matter.

Owns the start of replay for a model, with the check that it can, and the counts of a batch. The
choice itself is in `forge.rl.routing`.

Shapes: L tokens of a pass, M routed layers, K experts per token, T trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge.core.errors import InvalidArgument
from forge.core.routes import RouteShape
from forge.rl.parallel.world import World
from forge.rl.routing import RoutePass, find_routing, routed
from forge.rl.tree.parts import TreePart


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStats:
    """Differences between recorded experts and the model's own choice, over a batch."""

    tokens: int = 0
    """Tokens that were computed."""
    replayed: int = 0
    """Tokens with recorded experts; the model chose those of the others."""
    changed: int = 0
    """Replayed tokens for which the model's own choice differs in some layer."""
    choices: int = 0
    """Replayed tokens times layers."""
    changed_choices: int = 0
    """Choices for which the model's own choice differs."""
    compared: int = 0
    """Trained tokens that were computed a second time, by the model's own choice."""
    gap: float = 0.0
    """Mean of |log pi - log pi_behavior| over the compared tokens, with replay."""
    gap_free: float = 0.0
    """The same by the model's own choice."""

    @property
    def changed_share(self) -> float:
        """Changed tokens over replayed ones; 0 without any."""
        return self.changed / self.replayed if self.replayed else 0.0


def summed_stats(parts: Sequence[ReplayStats]) -> ReplayStats:
    """Statistics over the mini-batches of a batch, from those of each."""
    compared = sum(part.compared for part in parts)
    return ReplayStats(
        tokens=sum(part.tokens for part in parts),
        replayed=sum(part.replayed for part in parts),
        changed=sum(part.changed for part in parts),
        choices=sum(part.choices for part in parts),
        changed_choices=sum(part.changed_choices for part in parts),
        compared=compared,
        gap=sum(part.gap * part.compared for part in parts) / max(1, compared),
        gap_free=sum(part.gap_free * part.compared for part in parts) / max(1, compared),
    )


class Replay:
    """The routes of one policy's passes."""

    def __init__(self, shape: RouteShape) -> None:
        self.shape = shape
        self.begin()

    def begin(self) -> None:
        """Forget the counts of the batch before."""
        self._counts = torch.zeros(5, dtype=torch.float64)
        self._gaps = torch.zeros(3, dtype=torch.float64)

    def pass_of(self, part: TreePart) -> RoutePass:
        """The routes of a pass; its tokens without a record are chosen by the model."""
        routes = part.routes
        if routes is None:
            return RoutePass()
        return RoutePass(given_LMK=routes.ids_LMK, known_L=routes.known_L)

    def count(self, passed: RoutePass, part: TreePart) -> None:
        """Add a pass that has been computed."""
        counts = torch.zeros_like(self._counts)
        counts[0] = len(part.places_L)
        if passed.known_L is not None:
            changed_LM = passed.changes()
            known = int(passed.known_L.sum())
            counts[1], counts[2] = known, int(changed_LM.any(1).sum())
            counts[3], counts[4] = known * changed_LM.shape[1], int(changed_LM.sum())
        self._counts += counts

    def compare(self, logprobs_T: Tensor, free_T: Tensor, behavior_T: Tensor) -> None:
        """Add the log-probs of a tree with replay and without."""
        gaps = [(one.double() - behavior_T).abs().sum().cpu() for one in (logprobs_T, free_T)]
        self._gaps += torch.stack([torch.tensor(float(len(behavior_T))).double(), *gaps])

    def stats(self, world: World, device: torch.device) -> ReplayStats:
        """The counts over all ranks; all of them call it. Ranks that share a tree compare the same
        tokens, so gaps are summed over data groups."""
        counts = [world.over_tokens(one, device) for one in self._counts.tolist()]
        compared, gap, free = (world.summed(one, device) for one in self._gaps.tolist())
        tokens, replayed, changed, choices, changed_choices = map(int, counts)
        return ReplayStats(
            tokens=tokens,
            replayed=replayed,
            changed=changed,
            choices=choices,
            changed_choices=changed_choices,
            compared=int(compared),
            gap=gap / compared if compared else 0.0,
            gap_free=free / compared if compared else 0.0,
        )


@torch.no_grad()
def start_replay(model: Any, compute: Callable[[], Tensor]) -> Replay:
    """Let the routers of a model replay. `compute` returns log-probs of a few tokens by one forward
    pass of the model; all ranks call it.

    Raises `InvalidArgument` for a model whose routes cannot be recorded and replayed.
    """
    shape = find_routing(model, compute)
    passed = RoutePass()
    with routed(passed):
        plain = compute()
    own_LMK = passed.choice()
    known_L = torch.ones(len(own_LMK), dtype=torch.bool)

    def replayed(given_LMK: Tensor) -> Tensor:
        with routed(RoutePass(given_LMK=given_LMK, known_L=known_L)):
            return compute()

    name = type(model).__name__
    if not torch.allclose(replayed(own_LMK), plain, rtol=0, atol=1e-4):
        raise InvalidArgument(
            f"{name} cannot replay experts: replaying the model's own routes changes log-probs"
        )
    if torch.equal(replayed((own_LMK + 1) % shape.experts), plain):
        raise InvalidArgument(
            f"{name} cannot replay experts: replaying other routes changes nothing"
        )
    return Replay(shape)
