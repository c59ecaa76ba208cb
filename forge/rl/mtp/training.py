"""Training of the draft heads: their gradient on merged trees, their optimizer, their statistics.

The heads learn from the states and distributions that the policy's step computes. No gradient flows
back: the policy's gradient and its clipping are bitwise the same without heads, which have their
own clipping and optimizer. The loss of a batch is

    1/K sum_k 1/N sum_t D_k(t)

over the N trained tokens t of all its samples that have K tokens before their state's; D_k is the
loss of head k against the policy in the context of t. A context shared by several samples counts
once per sample; only `cross_entropy` depends on the sampled token.

One update with a batch uses little of it. With `update_tokens` the heads take an update with about
so many contexts, while the policy computes its trees; then N counts the tokens of one update. The
contexts of a tree are dealt out in turn, so that each update has all of its samples.

Shapes: R rows of a rank's share of a tree, E edges, L layout tokens, C hidden channels, K heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge.rl.collectives import all_reduce
from forge.rl.config import MtpConfig, OptimizerConfig
from forge.rl.model.head_logprobs import CHUNK_ELEMENTS
from forge.rl.model.policy import TreePolicy
from forge.rl.mtp.heads import MtpHeads
from forge.rl.mtp.losses import acceptance, topk_kl, total_variation
from forge.rl.optimizers import load_moments
from forge.rl.parallel.context_parallel import sum_gradients
from forge.rl.parallel.tensor_exchange import share
from forge.rl.tree.batch import TreeBatch
from forge.rl.tree.parts import HeadRows, parents
from forge.rl.tree.states import TreeStates

COPIES_HELD = 8
"""Approximate number of [rows, vocabulary] tables that a loss and its backward hold at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpStats:
    """Statistics of one batch by head; empty without heads."""

    losses: tuple[float, ...] = ()
    acceptance: tuple[float, ...] = ()
    """Mean over trained tokens of sum_v min(p_v, q_v): the share of drafts that would be accepted
    if the drafts before them were."""
    drafts: tuple[float, ...] = ()
    """Trained tokens with a draft of the head."""


def mean_stats(parts: Sequence[MtpStats]) -> MtpStats:
    """Statistics over the mini-batches of a batch, from those of each."""
    if len(parts) == 1:
        return parts[0]
    losses, accepted, drafts = (
        torch.tensor([getattr(part, name) for part in parts], dtype=torch.float64)
        for name in ("losses", "acceptance", "drafts")
    )
    shares = drafts / drafts.sum(0).clamp(min=1.0)
    return MtpStats(
        losses=tuple((losses * shares).sum(0).tolist()),
        acceptance=tuple((accepted * shares).sum(0).tolist()),
        drafts=tuple(drafts.sum(0).tolist()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    head: HeadRows
    counts_E: Tensor
    """Trained tokens of samples on each edge."""
    depths_R: Tensor
    """Number of tokens before the token of the row's state."""

    def every(self, step: int, first: int) -> _Rows:
        """Every `step`-th row from `first` on."""
        head, edges = self.head.every(step, first)
        depths_R = self.depths_R[first::step]
        return _Rows(head=head, counts_E=self.counts_E[edges], depths_R=depths_R)


class MtpTraining:
    """Trains the draft heads of one policy."""

    def __init__(self, policy: TreePolicy, config: MtpConfig, optimizer: OptimizerConfig) -> None:
        """`optimizer` gives the constants of AdamW and the largest gradient norm."""
        self.config = config
        self._grad_clip = optimizer.grad_clip
        self._policy = policy
        self._embedding: torch.nn.Embedding = policy.model.get_input_embeddings()
        channels = policy.model.config.get_text_config(decoder=True).hidden_size
        # The random numbers of the policy's training stay the same with heads and without.
        with torch.random.fork_rng(devices=[]):
            self.heads = MtpHeads(
                config.heads, channels=channels, embedding_channels=self._embedding.weight.shape[1]
            ).to(policy.device)
        if policy.states is None:
            policy.states = TreeStates()
        self._states = policy.states
        self._optimizer = torch.optim.AdamW(
            self.heads.parameters(), betas=optimizer.betas, weight_decay=0.0, fused=True
        )
        self._totals_KN = torch.zeros(0)

    def begin(self, rate_share: float) -> None:
        """Begin a batch at this share of the learning rate: reset gradients and statistics."""
        self._optimizer.zero_grad()
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.learning_rate * rate_share
        self._totals_KN = torch.zeros((self.config.heads, 3), dtype=torch.float64)

    def accumulate(self, tree: TreeBatch, *, tokens: int) -> None:
        """Add the gradient of the tree whose log-probs the policy computed last, for a loss that is
        divided by `tokens`, those of the batch; or update the heads on parts of the tree. All ranks
        call it equally often."""
        rows = self._rows(tree)
        if not self.config.update_tokens:
            self._add(tree, rows, tokens)
            return
        world, device = self._policy.world, self._policy.device
        contexts = world.total(len(rows.depths_R), device)
        parts = max(1, int(contexts) // self.config.update_tokens)
        for first in range(parts):
            part = rows.every(parts, first)
            trained = int(world.total(float(part.counts_E.sum()), device))
            self._optimizer.zero_grad()
            self._add(tree, part, max(1, trained))
            self._sum_gradients()
            self._update()

    def _add(self, tree: TreeBatch, rows: _Rows, tokens: int) -> None:
        count = len(rows.head.places_R)
        if not count:
            return
        with torch.autocast(self._policy.device.type, enabled=False):
            drafts = self._drafts(tree, rows.head.places_R)
            leaves = [draft.detach().requires_grad_() for draft in drafts]
            size = max(1, CHUNK_ELEMENTS // COPIES_HELD // self._policy.vocabulary)
            for first in range(0, count, size):
                self._differentiate(rows, slice(first, min(first + size, count)), leaves, tokens)
            torch.autograd.backward(drafts, [leaf.grad for leaf in leaves])

    def _rows(self, tree: TreeBatch) -> _Rows:
        """This rank's share of the contexts of trained tokens."""
        counts_E = torch.bincount(tree.edges_T.cpu(), minlength=len(tree.layout.head.rows_E))
        head, group = tree.layout.head, self._policy.group
        if group is not None:
            rows = share(len(head.places_R), group)
            head, edges = head.cut(rows.start, rows.stop)
            counts_E = counts_E[edges]
        depths_R, device = tree.layout.positions_L[head.places_R], self._policy.device
        return _Rows(
            head=head.to(device), counts_E=counts_E.to(device), depths_R=depths_R.to(device)
        )

    def _drafts(self, tree: TreeBatch, places_R: Tensor) -> list[Tensor]:
        """[R, C] state of each head; arbitrary for rows with too few tokens before them."""
        parents_L = parents(tree.layout.nodes).clamp(min=0).to(places_R.device)
        ids_L = tree.layout.ids_L.to(places_R.device)
        # Head k continues from head k - 1 one token earlier: find the tokens from the last head on.
        wanted = torch.unique(places_R)
        levels = [wanted]
        for _ in range(self.config.heads - 1):
            levels.insert(0, torch.unique(torch.cat([wanted, parents_L[levels[0]]])))
        below = torch.unique(parents_L[levels[0]])
        states = self._states.whole[below].to(self._type)
        drafts = []
        for head, level in zip(self.heads, levels, strict=True):
            before = torch.searchsorted(below, parents_L[level])
            with torch.no_grad():
                embeddings = self._embedding(ids_L[level]).to(self._type)
            states, below = head(states[before], embeddings), level
            drafts.append(states[torch.searchsorted(level, places_R)])
        return drafts

    def _differentiate(
        self, rows: _Rows, chunk: slice, leaves: Sequence[Tensor], tokens: int
    ) -> None:
        head, edges = rows.head.cut(chunk.start, chunk.stop)
        counts_E = rows.counts_E[edges]
        with torch.no_grad():
            states_RC = self._states.whole[head.places_R]
            policy_RV = self._policy.distributions(states_RC, head.temperatures_R)
        weights_R = counts_E.new_zeros(len(head.places_R)).index_add(0, head.rows_E, counts_E)
        for index, (module, leaf) in enumerate(zip(self.heads, leaves, strict=True)):
            reached_R = rows.depths_R[chunk] > index
            normed_RC: Tensor = module.out_norm(leaf[chunk])  # type: ignore[operator]
            drafted_RV = self._policy.distributions(normed_RC, head.temperatures_R)
            loss_R = self._loss(policy_RV, drafted_RV, head, counts_E, weights_R)
            loss = (loss_R * reached_R).sum()
            (loss / (tokens * self.config.heads)).backward()  # type: ignore[no-untyped-call]
            seen_R = weights_R * reached_R
            accepted = (acceptance(policy_RV, drafted_RV.detach()) * seen_R).sum()
            totals = torch.stack([loss.detach(), accepted, seen_R.sum().to(loss)])
            self._totals_KN[index] += totals.double().cpu()

    def _loss(
        self,
        policy_RV: Tensor,
        drafted_RV: Tensor,
        head: HeadRows,
        counts_E: Tensor,
        weights_R: Tensor,
    ) -> Tensor:
        """[R], summed over the trained tokens of each context."""
        match self.config.loss:
            case "topk_kl":
                return weights_R * topk_kl(policy_RV, drafted_RV, top_k=self.config.top_k)
            case "tv":
                return weights_R * total_variation(policy_RV, drafted_RV)
            case "cross_entropy":
                surprise_E = -drafted_RV[head.rows_E, head.targets_E] * counts_E
                return surprise_E.new_zeros(len(weights_R)).index_add(0, head.rows_E, surprise_E)

    @property
    def _type(self) -> torch.dtype:
        return next(self.heads.parameters()).dtype

    def reduce_gradients(self) -> None:
        """Sum gradients and statistics over the ranks, after all trees of a batch."""
        if not self.config.update_tokens:
            self._sum_gradients()
        everyone = self._policy.world.everyone
        if everyone is not None:
            totals = self._totals_KN.to(self._policy.device)
            all_reduce(totals, everyone)
            self._totals_KN = totals.cpu()

    def _sum_gradients(self) -> None:
        everyone = self._policy.world.everyone
        if everyone is not None:
            sum_gradients(self.heads.parameters(), everyone)

    def step(self) -> None:
        """Update the heads with the gradient of the batch, unless its parts have."""
        if not self.config.update_tokens:
            self._update()

    def _update(self) -> None:
        """Skips a gradient that is not finite."""
        parameters = list(self.heads.parameters())
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._grad_clip))
        if math.isfinite(norm):
            self._optimizer.step()

    def stats(self) -> MtpStats:
        """Statistics of the trees since `begin`."""
        losses, accepted, drafts = self._totals_KN.T
        count = drafts.clamp(min=1.0)
        return MtpStats(
            losses=tuple((losses / count).tolist()),
            acceptance=tuple((accepted / count).tolist()),
            drafts=tuple(drafts.tolist()),
        )

    def state_dict(self) -> dict[str, Any]:
        """The state for `load_state_dict`."""
        return {"heads": self.heads.named_tensors(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises `InvalidArgument` for the state of other heads."""
        self.heads.load_tensors(state["heads"])
        load_moments(self._optimizer, state["optimizer"])
