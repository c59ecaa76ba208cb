"""A transformers causal language model as the policy under training.

Owns the forward passes over a merged tree: the backbone with tree attention, and the head on the
rows needed. A tree is computed in one pass, in several with relayed keys, as one range per rank, or
sequence by sequence for a model without tree attention. `forge.rl.model.probe` checks the result
against the model's own forward. Owns no loss and no optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge.core.errors import InvalidArgument
from forge.core.prefix_tree import Span
from forge.rl import numerics
from forge.rl.attention.tree_attention import TREE_ATTENTION, Prefix, TreeInput, register
from forge.rl.collectives import all_reduce
from forge.rl.losses.moe_load_balance import RouterBalance
from forge.rl.model.backbone import Backbone, BackboneOutput
from forge.rl.model.capabilities import (
    Way,
    depends_on_length,
    forget_lengths,
    logit_scale,
    one_line,
    pair_cost,
    prefix_cost,
    unmergeable,
)
from forge.rl.model.capabilities import attention_channels as attention_channels
from forge.rl.model.head_logprobs import edge_logprobs, logits_logprobs
from forge.rl.parallel.context_parallel import (
    GatheredPrefix,
    gather_edges,
    rank_part,
    sum_gradients,
)
from forge.rl.parallel.partition import rank_spans
from forge.rl.tree.batch import TreeBatch
from forge.rl.tree.kv_relay import Relay, RelayPrefix, shared_slots
from forge.rl.tree.parts import HeadRows, TreePart, single_sequences
from forge.rl.tree.passes import Passes, PassOutput, run_passes, with_loss
from forge.rl.tree.separate_samples import separated
from forge.rl.tree.states import TreeStates

log = logging.getLogger(__name__)


class TreePolicy:
    """Log-probs of tree-merged samples under a causal language model."""

    def __init__(
        self,
        model: Any,
        *,
        autocast: torch.dtype | None = None,
        balance_coef: float = 0.0,
        group: dist.ProcessGroup | None = None,
        way: Way | None = None,
        own_attention: str = "",
    ) -> None:
        """Replaces the attention implementation of `model`. `autocast` is the backbone's type,
        None: that of the parameters; the head is always fp32 or wider. `way` is how trees are
        computed, None: by the configuration; `own_attention` is the stock implementation, "":
        that of the model. Raises `InvalidArgument` for a model without a language-model head.

        `balance_coef` is the weight of the load-balance loss of a mixture of experts, which is
        then part of every gradient. The ranks of `group` compute each tree together: they must
        hold the same weights and get the same batches.
        """
        register()
        if autocast is not None:
            numerics.patch(model)
        config = model.config.get_text_config(decoder=True)
        self.model = model
        self.autocast = autocast
        self.channels = attention_channels(config)
        self.balance = RouterBalance(config, coef=balance_coef) if balance_coef else None
        self.value_head: torch.nn.Linear | None = None
        """Set by a critic: each edge then has a value besides its log-prob."""
        self.states: TreeStates | None = None
        """Set to keep the backbone's last states of each tree, without gradient."""
        self.group = group
        """The ranks that compute each tree together, if there are any."""
        self.own_attention: str = own_attention or model.config._attn_implementation
        """The model's stock attention implementation."""
        self._pair_cost = pair_cost(self.channels)
        self._prefix_cost = prefix_cost(config)
        self._backbone = Backbone(model)
        self._head = _head_of(model)
        self._logit_scale = logit_scale(config)
        self._softcap: float = getattr(config, "final_logit_softcapping", None) or 0.0
        self.way = Way()
        """How trees are computed."""
        if way is None:
            self.settle(Way(unmerged=unmergeable(model), separate=depends_on_length(model)))
        else:
            self.use_way(way)

    @property
    def unmerged(self) -> str:
        """Why trees are computed sequence by sequence; "" if they are not."""
        return self.way.unmerged

    @property
    def family(self) -> str:
        """Name of the model's class."""
        return type(self.model).__name__

    @property
    def head_type(self) -> torch.dtype:
        """Type of the language-model head's weights."""
        return self._head.dtype

    @property
    def device(self) -> torch.device:
        """Device of the log-probs."""
        return self._head.device

    def arranged(self, batch: TreeBatch) -> TreeBatch:
        """The tree as this model computes it: split where samples are computed alone."""
        return separated(batch) if self.way.separate else batch

    def begin(self, trees: Sequence[TreeBatch]) -> None:
        """Announce the trees of one gradient. The load-balance loss is over all of them, so several
        trees are routed once in advance; without that loss this costs nothing."""
        if self.balance is None:
            return
        self.balance.reset()
        if len(trees) > 1:
            with torch.no_grad():
                for tree in trees:
                    self._edges(self.arranged(tree))
            self.balance.complete = True

    def logprobs(self, batch: TreeBatch) -> tuple[Tensor, Tensor]:
        """Log-prob (differentiable) and entropy of the trained tokens, both [T]."""
        columns_T, entropy_T = self._tokens(batch)
        return columns_T if self.value_head is None else columns_T[:, 0], entropy_T

    def logprobs_and_values(self, batch: TreeBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, the values of the states sampled in (both differentiable), entropies."""
        columns_T, entropy_T = self._tokens(batch)
        return columns_T[:, 0], columns_T[:, 1], entropy_T

    def _tokens(self, batch: TreeBatch) -> tuple[Tensor, Tensor]:
        if self.balance is not None and not self.balance.complete:
            self.balance.reset()
        batch = self.arranged(batch)
        columns_E, entropy_E = self._edges(batch)
        edges_T = batch.edges_T.to(columns_E.device)
        return columns_E[edges_T], entropy_E[edges_T]

    def distributions(self, states_RC: Tensor, temperatures_R: Tensor) -> Tensor:
        """[R, V] log-probs over the next token from states as in `states`, fp32 or wider;
        differentiable with respect to the states alone."""
        wide = torch.promote_types(states_RC.dtype, torch.float32)
        logits_RV = states_RC.to(wide) @ (self._head.detach().to(wide).T * self._logit_scale)
        if self._softcap:
            logits_RV = torch.tanh(logits_RV / self._softcap) * self._softcap
        return (logits_RV / temperatures_R[:, None]).log_softmax(-1)

    def plain(self) -> TreePolicy:
        """The same model for log-probs alone: without values, states and load balance."""
        bare = copy(self)
        bare.value_head = bare.states = bare.balance = None
        return bare

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary."""
        return self._head.shape[0]

    def pass_tokens(self, batch: TreeBatch) -> int:
        """Tokens of the largest pass of a tree, over all ranks."""
        if self.group is None:
            return batch.pass_tokens
        return max(end - start for start, end in self._spans(batch, self.group))

    def reduce_gradients(self) -> None:
        """Sum gradients over the ranks of the group, after all trees of a batch."""
        if self.group is not None:
            sum_gradients(self.model.parameters(), self.group)
            if self.balance is not None:
                shares = torch.tensor(self.balance.value, dtype=torch.float64)
                shares = shares.to(self.device)
                all_reduce(shares, self.group)
                self.balance.value = float(shares)
            if self.value_head is not None:
                sum_gradients(self.value_head.parameters(), self.group)

    def _edges(self, batch: TreeBatch) -> tuple[Tensor, Tensor]:
        if self.states is not None:
            self.states.begin(batch.tokens)
        if self.unmerged:
            return self._by_sequence(batch)
        if self.group is not None:
            return self._by_rank(batch, self.group)
        if len(batch.parts) > 1:
            return self._by_relay(batch)
        output = self._forward(batch.parts[0])
        return self._with_balance(output), output.entropy_E

    def _by_relay(self, batch: TreeBatch) -> tuple[Tensor, Tensor]:
        parts = batch.parts
        starts = [int(part.places_L[0]) for part in parts]
        spans = [(start, start + part.tokens) for start, part in zip(starts, parts, strict=True)]
        slots = shared_slots(spans, [part.prefix_P for part in parts])
        relay = Relay(sum(len(one.own) for one in slots))
        prefixes = [RelayPrefix(relay=relay, slots=one) for one in slots]
        return self._several(parts, prefixes, kept=1)

    def _by_sequence(self, batch: TreeBatch) -> tuple[Tensor, Tensor]:
        if self.group is not None:
            raise InvalidArgument(
                f"{self.family} cannot be trained by a group of ranks per tree: {self.unmerged}"
            )
        parts = [
            part
            for part in single_sequences(batch.layout)
            if len(part.edges_E) or self.balance is not None
        ]
        held = accumulate(part.tokens for part in reversed(parts))
        kept = sum(tokens <= batch.pass_tokens for tokens in held)
        return self._several(parts, [None] * len(parts), kept=max(1, kept))

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
        mine = rank_part(batch.layout, self._spans(batch, group), rank=dist.get_rank(group))
        prefix = GatheredPrefix(group=group, slots=mine.slots, size=mine.size)
        earlier = self.balance.totals() if self.balance is not None else 0.0
        output = self._forward(mine.part, prefix)
        if self.balance is not None and not self.balance.complete:
            own = self.balance.totals() - earlier  # what trees before have is all ranks' already
            assert isinstance(own, Tensor), "a pass has been made"
            all_reduce(own, group)
            self.balance.replace_totals(own + earlier)
        if self.states is not None:
            self.states.gather(group)
        logprobs_E = gather_edges(self._with_balance(output), mine, group)
        return logprobs_E, gather_edges(output.entropy_E, mine, group)

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
        head = part.head.to(self.device)
        inputs: dict[str, Any] = {"input_ids": part.ids_L.to(self.device)[None], "use_cache": False}
        if self.balance is not None:
            inputs["output_router_logits"] = True
        with numerics.autocast(self.device, self.autocast):
            if self.unmerged:
                if self.way.separate:
                    forget_lengths(self.model)
                wanted = self.value_head is not None or self.states is not None
                backbone, logits_RV = self._backbone.with_head(inputs, head.places_R, states=wanted)
            else:
                inputs["position_ids"] = part.positions_L.to(self.device)[None]
                inputs["tree"] = TreeInput(schedule=part.schedule, prefix=prefix)
                backbone = self._backbone(inputs, normed=self.states is not None)
        if self.unmerged:
            logprobs_E, entropy_R = logits_logprobs(logits_RV, head)
        else:
            scaled = head
            if self._logit_scale != 1.0:
                scaled = replace(head, temperatures_R=head.temperatures_R / self._logit_scale)
            logprobs_E, entropy_R = edge_logprobs(
                backbone.states_LC, self._head, scaled, norm=backbone.norm
            )
        if self.value_head is not None:
            logprobs_E = torch.stack([logprobs_E, self._values(backbone, head)], dim=1)
        if self.states is not None and backbone.normed_LC is not None and count:
            self.states.keep(part, backbone.normed_LC)
        mass_X = None
        if self.balance is not None:
            weights_L = part.weights_L.to(self.device)
            mass_X = self.balance.mass(backbone.router_logits, weights_L)
            if count:
                self.balance.count(backbone.router_logits, weights_L)
        return PassOutput(logprobs_E=logprobs_E, entropy_E=entropy_R[head.rows_E], mass_X=mass_X)

    def _values(self, backbone: BackboneOutput, head: HeadRows) -> Tensor:
        """[E] value of the state that each edge leaves, in fp32 or wider."""
        assert self.value_head is not None
        with torch.autocast(self.device.type, enabled=False):
            states_RC = backbone.states_LC.index_select(0, head.places_R)
            if backbone.norm is not None:
                states_RC = backbone.norm(states_RC)
            wide = torch.promote_types(states_RC.dtype, torch.float32)
            weight, bias = self.value_head.weight.to(wide), self.value_head.bias.to(wide)
            values_R: Tensor = states_RC.to(wide) @ weight[0] + bias
        return values_R[head.rows_E]

    def over(self, model: Any, way: Way) -> TreePolicy:
        """A policy with another model's weights and the given way."""
        return TreePolicy(model, way=way, own_attention=self.own_attention)

    def use_way(self, way: Way) -> None:
        """Compute trees this way from now on."""
        self.way = way
        attention = self.own_attention if way.unmerged else TREE_ATTENTION
        self.model.set_attn_implementation(attention)

    def settle(self, way: Way, *, known: str = "") -> None:
        """Compute trees this way; log the reason for unmerged trees unless it is `known`."""
        try:
            self.use_way(way)
        except (ValueError, AttributeError) as error:
            way = Way(unmerged=f"it takes no other attention ({one_line(error)})", separate=True)
            self.use_way(way)
        if way.unmerged and way.unmerged != known:
            alone = ", each sample alone" if way.separate else ""
            log.warning(
                "%s is trained sequence by sequence, without merging prefixes%s: %s",
                self.family,
                alone,
                way.unmerged,
            )

    @contextmanager
    def stock_attention(self) -> Iterator[None]:
        """Context in which the model uses its stock attention."""
        self.model.set_attn_implementation(self.own_attention)
        try:
            yield
        finally:
            self.use_way(self.way)

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Context in which passes use this process alone and the type of the master weights."""
        # Rounding under autocast differs with the shape of a pass.
        autocast, self.autocast = self.autocast, None
        group, self.group = self.group, None
        try:
            yield
        finally:
            self.autocast, self.group = autocast, group


def _head_of(model: Any) -> Tensor:
    head = model.get_output_embeddings()
    if head is None or not isinstance(getattr(head, "weight", None), Tensor):
        raise InvalidArgument(
            f"{type(model).__name__} cannot be trained: it has no language-model head"
        )
    weight: Tensor = head.weight
    return weight
