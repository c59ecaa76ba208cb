"""A transformers causal language model as the policy under training.

Owns the forward passes over a merged tree: the backbone with tree attention, and the head on the
rows needed. A tree is computed in one pass, in several with relayed keys, as one range per rank, or
sequence by sequence for a model without tree attention. `forge.rl.model.probe` checks the result
against the model's own forward. Owns no loss and no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from forge.core.errors import InvalidArgument
from forge.core.prefix_tree import Span
from forge.rl import numerics
from forge.rl.attention.tree_attention import Prefix
from forge.rl.losses.moe_load_balance import RouterBalance
from forge.rl.model.attention_switch import AttentionSwitch
from forge.rl.model.backbone import Backbone
from forge.rl.model.capabilities import (
    Way,
    attention_channels,
    forget_lengths,
    logits_of,
    pair_cost,
    prefix_cost,
    weight_of,
)
from forge.rl.model.forked_states import NO_PARTS, fork_states, tree_input
from forge.rl.model.head_logprobs import distributions, edge_columns
from forge.rl.model.narrow_layers import widen_layers
from forge.rl.model.replay import Replay, start_replay
from forge.rl.model.shared_rows import shared_columns
from forge.rl.parallel.context_parallel import (
    GatheredPrefix,
    gather_edges,
    rank_part,
    sum_gradients,
)
from forge.rl.parallel.handed_states import handed_states
from forge.rl.parallel.partition import rank_spans
from forge.rl.parallel.sharding import Entry, shard
from forge.rl.parallel.world import World
from forge.rl.routing import routed
from forge.rl.tree.batch import TreeBatch
from forge.rl.tree.kv_relay import relay_prefixes
from forge.rl.tree.parts import TreePart, single_sequences, with_empty
from forge.rl.tree.passes import Passes, PassOutput, run_passes, with_loss
from forge.rl.tree.separate_samples import separated
from forge.rl.tree.states import TreeStates

T = TypeVar("T")


class TreePolicy:
    """Log-probs of tree-merged samples under a causal language model."""

    def __init__(
        self,
        model: Any,
        *,
        autocast: torch.dtype | None = None,
        balance_coef: float = 0.0,
        way: Way | None = None,
        own_attention: str = "",
    ) -> None:
        """Replaces the attention implementation of `model`. `autocast` is the backbone's type,
        None: that of the parameters; the head is always fp32 or wider. `way` is how trees are
        computed, None: by the configuration; `own_attention` is the stock implementation, "":
        that of the model. Raises `InvalidArgument` for a model without a language-model head.

        `balance_coef` is the weight of the load-balance loss of a mixture of experts, which is
        then part of every gradient.
        """
        if autocast is not None:
            numerics.patch(model)
        config = model.config.get_text_config(decoder=True)
        self.model = model
        self.autocast = autocast
        self.channels = attention_channels(config)
        self.balance = RouterBalance(config, coef=balance_coef) if balance_coef else None
        self.value_head: torch.nn.Linear | None = None
        """Set by a critic: each edge then has a value besides its log-prob."""
        self.entropy_gradient = False
        """Set for an entropy bonus: entropies are then differentiable."""
        self.replay: Replay | None = None
        """Set by `replay_routes`: passes use the experts that trees have on record."""
        self.states: TreeStates | None = None
        """Set to keep the backbone's last states of each tree, without gradient."""
        self.world = World()
        """Set by `spread`."""
        self.group = self.world.tree
        """The ranks that compute each tree together, if there are any."""
        self._pair_cost = pair_cost(self.channels)
        self._prefix_cost = prefix_cost(config)
        self._backbone = Backbone(model)
        self._entry = Entry(model)
        self._forked = fork_states(model)
        weight_of(model)
        self.attention = AttentionSwitch(model, forked=self._forked, way=way, own=own_attention)

    def spread(self, world: World, *, narrow: torch.dtype | None = None) -> None:
        """Compute as one of the ranks of `world`, which have equal parameters and get equal trees
        within a group; shard the parameters if the world does. Raises like `sharding.shard`, which
        explains `narrow`."""
        self.world, self.group = world, world.tree
        if world.parts is not None:
            reason = self.undividable or (NO_PARTS if self._forked else "")
            if reason:
                raise InvalidArgument(
                    f"mesh.tp = {world.shape.tp} is not allowed for {self.family}: {reason}"
                )
        if world.meshes is not None:
            widen_layers(self.model)
            shard(self._entry, world, narrow=narrow)

    def run(self, compute: Callable[[], T]) -> T:
        """A computation with the model outside of this class; all ranks run it."""
        return self._entry.run(compute)

    def gathered(self) -> AbstractContextManager[None]:
        """Context with embedding and head whole; all ranks enter it."""
        return self._entry.gathered()

    @property
    def way(self) -> Way:
        """Way in which trees are computed."""
        return self.attention.way

    @property
    def unmerged(self) -> str:
        """Reason why trees are computed sequence by sequence; "" if they are not."""
        return self.way.unmerged

    @property
    def undividable(self) -> str:
        """Reason why several ranks cannot share a tree, or its tokens; "" if they can."""
        return f"it is trained sequence by sequence, since {self.unmerged}" if self.unmerged else ""

    @property
    def family(self) -> str:
        """Name of the model's class."""
        return type(self.model).__name__

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary."""
        return weight_of(self.model).shape[0]

    @property
    def head_type(self) -> torch.dtype:
        """Type of the language-model head's weights."""
        return weight_of(self.model).dtype

    @property
    def device(self) -> torch.device:
        """Device of the log-probs."""
        return weight_of(self.model).device

    def arranged(self, batch: TreeBatch) -> TreeBatch:
        """The tree as this model computes it: split where samples are computed alone."""
        return separated(batch) if self.way.separate else batch

    def passes(self, batch: TreeBatch) -> int:
        """Passes of a tree that `arranged` returned."""
        if self.unmerged:
            return max(1, len(self._sequences(batch)))
        return 1 if self.group is not None else len(batch.parts)

    def begin(self, trees: Sequence[tuple[TreeBatch, int]]) -> None:
        """Announce the trees of one gradient, with their passes. A load-balance loss is over all of
        them: several trees are routed once in advance."""
        if self.balance is None:
            return
        self.balance.reset()
        if len(trees) > 1 or self.world.data is not None:
            with torch.no_grad():
                for tree, passes in trees:
                    self._edges(self.arranged(tree), passes)
            if self.world.data is not None and trees:
                self.balance.sum_over(self.world.data)
            self.balance.complete = True

    def logprobs(self, batch: TreeBatch, *, passes: int = 0) -> tuple[Tensor, Tensor]:
        """Log-prob (differentiable) and entropy of the trained tokens, both [T]. `passes`: at least
        that many, the first of them empty."""
        columns_T, entropy_T = self._tokens(batch, passes)
        return columns_T if columns_T.ndim == 1 else columns_T[:, 0], entropy_T

    def logprobs_and_values(
        self, batch: TreeBatch, *, passes: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, the values of the states sampled in (both differentiable), entropies."""
        columns_T, entropy_T = self._tokens(batch, passes)
        return columns_T[:, 0], columns_T[:, 1], entropy_T

    def _tokens(self, batch: TreeBatch, passes: int) -> tuple[Tensor, Tensor]:
        if self.balance is not None and not self.balance.complete:
            self.balance.reset()
        batch = self.arranged(batch)
        columns_E, entropy_E = self._edges(batch, passes)
        edges_T = batch.edges_T.to(columns_E.device)
        columns_T = columns_E[edges_T]
        return columns_T, columns_T[:, -1] if self.entropy_gradient else entropy_E[edges_T]

    def distributions(self, states_RC: Tensor, temperatures_R: Tensor) -> Tensor:
        """[R, V] log-probs over the next token from states as in `states`."""
        model = self.model
        return distributions(states_RC, weight_of(model), temperatures_R, logits_of(model))

    def plain(self) -> TreePolicy:
        """The same model for log-probs alone: without values, states and load balance."""
        bare = copy(self)
        bare.value_head = bare.states = bare.balance = None
        bare.entropy_gradient = False
        return bare

    def without_replay(self) -> TreePolicy:
        """The same model for log-probs alone, which chooses all experts itself."""
        bare = self.plain()
        bare.replay = None
        return bare

    def replay_routes(self, compute: Callable[[], Tensor]) -> None:
        """Replay recorded experts from now on. Takes and raises what `start_replay` does."""
        with torch.no_grad(), self.attention.stock():
            self.replay = self.run(lambda: start_replay(self.model, compute))

    def pass_tokens(self, batch: TreeBatch) -> int:
        """Tokens of the largest pass of a tree, over all ranks."""
        if self.group is None:
            return batch.pass_tokens
        return max(end - start for start, end in self._spans(batch, self.group))

    def reduce_gradients(self) -> None:
        """Sum gradients over all ranks, after all trees of a batch. Those of sharded parameters
        are sums already."""
        everyone = self.world.everyone
        if everyone is not None:
            if not self.world.shape.sharded:
                sum_gradients(self.model.parameters(), everyone)
            if self.balance is not None:
                self.balance.value = self.world.over_tokens(self.balance.value, self.device)
            if self.value_head is not None:
                sum_gradients(self.value_head.parameters(), everyone)

    def _edges(self, batch: TreeBatch, passes: int) -> tuple[Tensor, Tensor]:
        if self.states is not None:
            self.states.begin(batch.tokens)
        if self.group is not None and (reason := self.undividable):
            raise InvalidArgument(f"ranks cannot share a tree of {self.family}: {reason}")
        if self.unmerged:
            return self._by_sequence(batch, passes)
        if self.group is not None:
            return self._by_rank(batch, self.group)
        if max(passes, len(batch.parts)) > 1:
            return self._by_relay(batch, passes)
        output = self._forward(batch.parts[0])
        return self._with_balance(output), output.entropy_E

    def _by_relay(self, batch: TreeBatch, passes: int) -> tuple[Tensor, Tensor]:
        parts = with_empty(batch.layout, batch.parts, passes)
        empty = len(parts) - len(batch.parts)
        return self._several(parts, [*[None] * empty, *relay_prefixes(batch.parts)], kept=1)

    def _by_sequence(self, batch: TreeBatch, passes: int) -> tuple[Tensor, Tensor]:
        parts = with_empty(batch.layout, self._sequences(batch), passes)
        held = accumulate(part.tokens for part in reversed(parts))
        kept = max(1, sum(tokens <= batch.pass_tokens for tokens in held))
        # Ranks of several data groups run the same passes in the same order.
        return self._several(parts, [None] * len(parts), kept=1 if passes else kept)

    def _sequences(self, batch: TreeBatch) -> list[TreePart]:
        parts = single_sequences(batch.layout)
        return [one for one in parts if len(one.edges_E) or self.balance is not None]

    def _several(
        self, parts: Sequence[TreePart], prefixes: Sequence[Prefix | None], *, kept: int
    ) -> tuple[Tensor, Tensor]:
        counted: set[int] = set()

        def run(index: int) -> PassOutput:
            again = index in counted
            counted.add(index)
            return self._forward(parts[index], prefixes[index], count=not again)

        def extra_loss(output: PassOutput) -> Tensor | None:
            if self.balance is None or output.mass_X is None:
                return None
            return self.balance.loss(output.mass_X)

        edges = [part.edges_E for part in parts]
        return run_passes(
            Passes(run=run, edges=edges, kept=kept, extra_loss=extra_loss, device=self.device)
        )

    def _by_rank(self, batch: TreeBatch, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        spans, rank = self._spans(batch, group), dist.get_rank(group)
        mine = rank_part(batch.layout, spans, rank=rank)
        states = None
        if self._forked:
            states = handed_states(batch.layout, spans, mine.part, rank=rank, group=group)
        prefix = GatheredPrefix(group=group, slots=mine.slots, size=mine.size, states=states)
        earlier = self.balance.totals() if self.balance is not None else 0.0
        output = self._forward(mine.part, prefix)
        if self.balance is not None and not self.balance.complete:
            self.balance.sum_over(group, earlier=earlier)
        if self.states is not None:
            self.states.gather(group)
        edges_E = mine.part.edges_E
        logprobs_E = gather_edges(self._with_balance(output), edges_E, mine.edges, group)
        return logprobs_E, gather_edges(output.entropy_E, edges_E, mine.edges, group)

    def _spans(self, batch: TreeBatch, group: dist.ProcessGroup) -> list[Span]:
        return rank_spans(
            batch.layout,
            dist.get_world_size(group),
            pair_cost=self._pair_cost,
            budget=batch.token_budget,
            prefix_cost=self._prefix_cost,
        )

    def _with_balance(self, output: PassOutput) -> Tensor:
        if self.balance is None or output.mass_X is None or not torch.is_grad_enabled():
            return output.logprobs_E
        return with_loss(output.logprobs_E, self.balance.loss(output.mass_X))

    def _forward(
        self, part: TreePart, prefix: Prefix | None = None, *, count: bool = True
    ) -> PassOutput:
        """One pass through the model; `count` is False when the pass is a repetition."""
        outputs = self._entry.run(partial(self._computed, part, prefix, count))
        return PassOutput(logprobs_E=outputs[0], entropy_E=outputs[1], mass_X=outputs[2])

    def _computed(
        self, part: TreePart, prefix: Prefix | None, count: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Columns and entropies [E], probability mass of experts [X]."""
        head, logits_RV = part.head.to(self.device), None
        inputs: dict[str, Any] = {"input_ids": part.ids_L.to(self.device)[None], "use_cache": False}
        if self.balance is not None:
            inputs["output_router_logits"] = True
        passed = self.replay.pass_of(part) if self.replay is not None else None
        with routed(passed), numerics.autocast(self.device, self.autocast):
            if self.unmerged:
                if self.way.separate:
                    forget_lengths(self.model)
                if self.way.own_head:
                    backbone, logits_RV = self._backbone.with_head(inputs, head.places_R)
                else:
                    backbone = self._backbone.up_to_head(inputs)
            else:
                inputs["position_ids"] = part.positions_L[None].to(self.device, copy=True)
                inputs["tree"] = tree_input(part, prefix, forked=self._forked)
                backbone = self._backbone(inputs, normed=self.states is not None)
        columns = partial(
            edge_columns,
            logits_RV=logits_RV,
            weight_VC=weight_of(self.model),
            logits=logits_of(self.model),
            value_head=self.value_head,
            entropy_gradient=self.entropy_gradient,
            backbone_type=self.autocast,
        )
        columns_E, entropy_E = shared_columns(columns, backbone, head, self.world.parts)
        if self.states is not None and backbone.normed_LC is not None and count:
            self.states.keep(part, backbone.normed_LC)
        if self.replay is not None and passed is not None and count:
            self.replay.count(passed, part)
        mass_X, weights_L = None, part.weights_L.to(self.device)
        if self.balance is not None:
            mass_X = self.balance.mass(backbone.router_logits, weights_L)
            if count:
                self.balance.count(backbone.router_logits, weights_L)
        return columns_E, entropy_E, mass_X

    def over(self, model: Any, way: Way) -> TreePolicy:
        """A policy with another model's weights and the given way."""
        return TreePolicy(model, way=way, own_attention=self.attention.own)

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Context in which passes use this process alone and the type of the master weights, since
        rounding under autocast differs with the shape of a pass."""
        autocast, self.autocast = self.autocast, None
        group, self.group = self.group, None
        try:
            yield
        finally:
            self.autocast, self.group = autocast, group
