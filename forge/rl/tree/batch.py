"""A tree plan as tensors: the model's inputs, and the places of its samples' tokens in the outputs.

Owns the index arithmetic between samples and the merged layout. `forge.core.prefix_tree` plans
trees, `forge.rl.tree.parts` has the parts of a tree, `forge.rl.model.policy` computes them.

Shapes: L layout tokens, T trained tokens of all samples in the tree, E distinct edges (a trained
token at one place of the layout), R logit rows (a token some edge leaves from), S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from forge.core.prefix_tree import Node, Sample, TreePlan
from forge.rl.tree.parts import HeadRows, TreeLayout, TreePart, cut_part, parents
from forge.rl.tree.routes import TreeRoutes


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeBatch:
    """One tree, ready for its passes, with its samples' columns."""

    layout: TreeLayout
    parts: tuple[TreePart, ...]
    """One pass each; several if the tree exceeds the budget."""
    edges_T: Tensor
    """Edge of each trained token: two samples on the same edge share its log-prob."""
    behavior_T: Tensor
    """Float32 behavior log-prob."""
    advantages_T: Tensor
    versions_T: Tensor
    lengths_S: Tensor
    """Trained tokens of each sample; tokens of a sample are contiguous in the [T] columns."""
    returns_T: Tensor | None
    """Return-to-go of the token's turn; None without a critic."""
    shares_T: Tensor | None
    """`Sample.shares`; None: all are 1."""
    domains_S: tuple[str, ...]
    engines_S: tuple[str, ...]
    numbers_S: tuple[int, ...]
    """`Sample.number` of each sample."""
    sample_tokens: int
    """Tokens of all samples without merging."""
    lasts_S: Tensor
    """Layout index of each sample's last token."""
    trajectories_S: Tensor
    """Trajectory of each sample, from 0 on over the whole batch."""
    trajectory_tokens_S: Tensor
    """Trained tokens of the sample's trajectory, over the whole batch."""
    token_budget: int = 0
    """Most tokens of a pass in the plan; 0: no bound."""
    separate: bool = False
    """Each distinct sample is a separate sequence (`forge.rl.tree.separate_samples`)."""

    @property
    def tokens(self) -> int:
        """L."""
        return self.layout.ids_L.shape[0]

    @property
    def pass_tokens(self) -> int:
        """Tokens of the largest pass, which determine the memory."""
        return max(part.tokens for part in self.parts)

    @property
    def trained_tokens(self) -> int:
        """T."""
        return self.edges_T.shape[0]

    def work(self, pair_cost: float) -> float:
        """Tokens to compute, each weighted by the tokens it attends."""
        return float((1.0 + pair_cost * (self.layout.positions_L + 1).double()).sum())

    def to(self, device: torch.device) -> TreeBatch:
        """A batch with its columns on `device`; passes move their own inputs."""
        if self.edges_T.device == device:
            return self
        columns = (
            *("edges_T", "behavior_T", "advantages_T", "versions_T", "lengths_S"),
            *("trajectories_S", "trajectory_tokens_S"),
        )
        moved = {name: getattr(self, name).to(device) for name in columns}
        optional = {
            name: one.to(device)
            for name in ("returns_T", "shares_T")
            if (one := getattr(self, name)) is not None
        }
        return replace(self, **moved, **optional)


def idle_tree(channels: int) -> TreeBatch:
    """A tree of one token without effect and without trained tokens, for a rank without a tree."""
    none, empty = torch.zeros(0, dtype=torch.long), torch.zeros(0)
    head = HeadRows(places_R=none, temperatures_R=empty, rows_E=none, targets_E=none)
    layout = TreeLayout(
        nodes=(Node(0, 1, 1, 0, -1),),
        ids_L=torch.zeros(1, dtype=torch.long),
        positions_L=torch.zeros(1, dtype=torch.long),
        weights_L=torch.zeros(1, dtype=torch.float64),
        head=head,
        channels=channels,
    )
    return TreeBatch(
        layout=layout,
        parts=(cut_part(layout, (0, 1)),),
        edges_T=none,
        behavior_T=empty,
        advantages_T=empty,
        versions_T=none.int(),
        lengths_S=none,
        returns_T=None,
        shares_T=None,
        domains_S=(),
        engines_S=(),
        numbers_S=(),
        sample_tokens=0,
        lasts_S=none,
        trajectories_S=none,
        trajectory_tokens_S=none,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectories:
    """The trajectories of a batch's samples; both columns have one entry per sample."""

    numbers: np.ndarray
    """From 0 on, without gaps."""
    tokens: np.ndarray
    """Trained tokens of the sample's trajectory."""


def trajectories_of(samples: Sequence[Sample]) -> Trajectories:
    """The trajectories of samples that make a whole batch."""
    given = [
        -1 - index if one.trajectory < 0 else one.trajectory for index, one in enumerate(samples)
    ]
    trained = np.asarray([one.trained_tokens for one in samples], np.int64)
    _, numbers = np.unique(np.asarray(given, np.int64), return_inverse=True)
    totals = np.zeros(len(samples), np.int64)
    np.add.at(totals, numbers, trained)
    return Trajectories(numbers=numbers, tokens=totals[numbers])


def build_tree_batch(
    plan: TreePlan,
    samples: Sequence[Sample],
    *,
    channels: int,
    token_budget: int = 0,
    trajectories: Trajectories | None = None,
    routes: TreeRoutes | None = None,
) -> TreeBatch:
    """Tensors of one plan over `samples` (the list the plan was made from).

    `channels` is query heads times head size of the model; `trajectories` are those of `samples`,
    computed once for all plans; `routes` are those of the plan's layout.
    """
    chosen = [samples[index] for index in plan.samples]
    places = list(plan.samples)
    whole = trajectories or trajectories_of(samples)
    layout, edges_T = _layout(plan, chosen, channels=channels, routes=routes)
    return TreeBatch(
        layout=layout,
        parts=tuple(cut_part(layout, span) for span in plan.parts),
        edges_T=torch.from_numpy(edges_T),
        behavior_T=_column(chosen, "behavior_logprobs", np.float32),
        advantages_T=_column(chosen, "advantages", np.float32),
        versions_T=_column(chosen, "weight_versions", np.int32),
        lengths_S=torch.tensor([one.trained_tokens for one in chosen]),
        returns_T=_returns(chosen),
        shares_T=_shares(chosen),
        domains_S=tuple(one.domain for one in chosen),
        engines_S=tuple(one.engine for one in chosen),
        numbers_S=tuple(one.number for one in chosen),
        sample_tokens=sum(one.tokens for one in chosen),
        lasts_S=torch.tensor(plan.lasts, dtype=torch.long),
        token_budget=token_budget,
        trajectories_S=torch.from_numpy(whole.numbers[places]),
        trajectory_tokens_S=torch.from_numpy(whole.tokens[places]),
    )


def _layout(
    plan: TreePlan, chosen: Sequence[Sample], *, channels: int, routes: TreeRoutes | None
) -> tuple[TreeLayout, np.ndarray]:
    """The nodes and logit rows of a plan, and the edge of each trained token."""
    ids_L = np.frombuffer(plan.ids, np.int32)
    temperatures, kinds = np.unique([one.temperature for one in chosen], return_inverse=True)
    places_T = _ranges([span for spans in plan.trained for span in spans])
    kinds_T = np.repeat(kinds, [one.trained_tokens for one in chosen])
    parents_L = parents(plan.nodes).numpy()
    head, edges_T = _head_rows(
        ids_L, parents_L[places_T], places_T, kinds_T, temperatures.astype(np.float32)
    )
    layout = TreeLayout(
        nodes=plan.nodes,
        ids_L=torch.from_numpy(ids_L.astype(np.int64)),
        positions_L=torch.from_numpy(_positions(plan.nodes)),
        weights_L=torch.from_numpy(_multiplicities(plan)),
        head=head,
        channels=channels,
        routes=routes,
    )
    return layout, edges_T


def _returns(samples: Sequence[Sample]) -> Tensor | None:
    if not all(one.returns for one in samples):
        return None
    return _column(samples, "returns", np.float32)


def _shares(samples: Sequence[Sample]) -> Tensor | None:
    if not any(one.shares for one in samples):
        return None
    parts = [
        np.frombuffer(one.shares, np.float32)
        if one.shares
        else np.ones(one.trained_tokens, np.float32)
        for one in samples
    ]
    return torch.from_numpy(np.concatenate(parts))


def _multiplicities(plan: TreePlan) -> np.ndarray:
    """[L] how many samples contain each token: those that end in its subtree."""
    lasts_L = np.bincount(np.asarray(plan.lasts, np.int64), minlength=plan.tokens)
    ended = np.concatenate([[0], np.cumsum(lasts_L)])
    bounds = np.asarray([(node.start, node.end, node.subtree_end) for node in plan.nodes])
    ends_L = np.repeat(bounds[:, 2], bounds[:, 1] - bounds[:, 0])
    counts: np.ndarray = (ended[ends_L] - ended[: plan.tokens]).astype(np.float64)
    return counts


def _head_rows(
    ids_L: np.ndarray,
    parents_T: np.ndarray,
    places_T: np.ndarray,
    kinds_T: np.ndarray,
    temperatures: np.ndarray,
) -> tuple[HeadRows, np.ndarray]:
    """Distinct rows (parent, temperature) and edges (row, place), and the edge of each token."""
    kinds = max(1, len(temperatures))
    rows, rows_T = np.unique(parents_T * kinds + kinds_T, return_inverse=True)
    size = max(1, len(ids_L))
    edges, edges_T = np.unique(rows_T * size + places_T, return_inverse=True)
    head = HeadRows(
        places_R=torch.from_numpy(rows // kinds),
        temperatures_R=torch.from_numpy(temperatures[rows % kinds]),
        rows_E=torch.from_numpy(edges // size),
        targets_E=torch.from_numpy(ids_L[edges % size].astype(np.int64)),
    )
    return head, edges_T


def _ranges(spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """The integers of half-open ranges, concatenated."""
    bounds = np.asarray(spans, np.int64).reshape(-1, 2)
    lengths = bounds[:, 1] - bounds[:, 0]
    offsets = np.repeat(bounds[:, 0] - (np.cumsum(lengths) - lengths), lengths)
    values: np.ndarray = np.arange(len(offsets), dtype=np.int64) + offsets
    return values


def _positions(nodes: Sequence[Node]) -> np.ndarray:
    return _ranges([(node.depth, node.depth + node.end - node.start) for node in nodes])


def _column(samples: Sequence[Sample], name: str, dtype: type[np.generic]) -> Tensor:
    data = b"".join(getattr(one, name) for one in samples)
    return torch.from_numpy(np.frombuffer(data, dtype).copy())
