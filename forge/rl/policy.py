"""A transformers causal language model as the policy being trained.

Owns the forward passes over a merged tree: trunk with tree attention, head on the rows needed, and
which way a tree takes: one pass, several with relayed keys, one range per rank, or sequence by
sequence for a model that trees do not fit. Also owns the check that this equals the model's own
forward, since only the model's code knows what it computes. Losses and optimizer steps are
elsewhere.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge.core.errors import InvalidArgument
from forge.core.packing import Sample, Span, plan_trees
from forge.rl.balance import RouterBalance
from forge.rl.context_parallel import GatheredPrefix, gather_edges, rank_part, sum_gradients
from forge.rl.exchange import all_reduce
from forge.rl.logprobs import edge_logprobs, logits_logprobs
from forge.rl.model_support import attention_channels as attention_channels
from forge.rl.model_support import logit_scale, pair_cost, prefix_cost, unmergeable
from forge.rl.passes import Passes, PassOutput, run_passes, with_loss
from forge.rl.rank_balance import rank_spans
from forge.rl.relay import Relay, RelayPrefix, shared_slots
from forge.rl.tree_attention import TREE_ATTENTION, Prefix, TreeInput, register
from forge.rl.tree_batch import TreeBatch, build_tree_batch
from forge.rl.tree_parts import HeadRows, TreePart, single_sequences
from forge.rl.tree_states import TreeStates
from forge.rl.trunk import Trunk, TrunkOutput

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
    ) -> None:
        """Takes over `model`'s attention implementation. `autocast` is the trunk's type, None
        for the parameters' own; the head is always fp32 or wider.

        `balance_coef` weighs the load-balance loss of a mixture of experts, which then is part of
        every gradient. The ranks of `group` compute each tree together: they must hold the same
        weights and be given the same batches.
        """
        register()
        config = model.config.get_text_config()
        self.model = model
        self.autocast = autocast
        self.channels = attention_channels(config)
        self.balance = RouterBalance(config, coef=balance_coef) if balance_coef else None
        self.unmerged = ""
        """Why trees are computed sequence by sequence; "" if they are not."""
        self.value_head: torch.nn.Linear | None = None
        """Set by who has a critic: values then come with the log-probs, edge by edge."""
        self.states: TreeStates | None = None
        """Set by who wants the trunk's last states of each tree, without their gradient."""
        self._group = group
        self._own_attention: str = model.config._attn_implementation
        self._pair_cost = pair_cost(self.channels)
        self._prefix_cost = prefix_cost(config)
        self._trunk = Trunk(model)
        self._head: Tensor = model.get_output_embeddings().weight
        self._logit_scale = logit_scale(config)
        self._softcap: float = getattr(config, "final_logit_softcapping", None) or 0.0
        reason = unmergeable(model)
        if reason:
            self._compute_sequences(reason)
        else:
            model.set_attn_implementation(TREE_ATTENTION)

    @property
    def device(self) -> torch.device:
        """Where log-probs are."""
        return self._head.device

    def begin(self, trees: Sequence[TreeBatch]) -> None:
        """Announce the trees of one gradient. The load-balance loss is over all of them, so where
        there are several they are routed once in advance; otherwise this costs nothing."""
        if self.balance is None:
            return
        self.balance.reset()
        if len(trees) > 1:
            with torch.no_grad():
                for tree in trees:
                    self._edges(tree)
            self.balance.sealed = True

    def logprobs(self, batch: TreeBatch) -> tuple[Tensor, Tensor]:
        """Log-prob (differentiable) and entropy of the trained tokens, both [T]."""
        columns_T, entropy_T = self._tokens(batch)
        return columns_T if self.value_head is None else columns_T[:, 0], entropy_T

    def logprobs_and_values(self, batch: TreeBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, the values of the states sampled in (both differentiable), entropies."""
        columns_T, entropy_T = self._tokens(batch)
        return columns_T[:, 0], columns_T[:, 1], entropy_T

    def _tokens(self, batch: TreeBatch) -> tuple[Tensor, Tensor]:
        if self.balance is not None and not self.balance.sealed:
            self.balance.reset()
        columns_E, entropy_E = self._edges(batch)
        edges_T = batch.edges_T.to(columns_E.device)
        return columns_E[edges_T], entropy_E[edges_T]

    def distributions(self, states_RC: Tensor, temperatures_R: Tensor) -> Tensor:
        """[R, V] log-probs over the next token, from states as `states` holds them, differentiable
        by these alone; fp32 or wider."""
        wide = torch.promote_types(states_RC.dtype, torch.float32)
        logits_RV = states_RC.to(wide) @ (self._head.detach().to(wide).T * self._logit_scale)
        if self._softcap:
            logits_RV = torch.tanh(logits_RV / self._softcap) * self._softcap
        return (logits_RV / temperatures_R[:, None]).log_softmax(-1)

    def plain(self) -> TreePolicy:
        """The same model for its log-probs alone: no values, no states, no balance."""
        bare = copy(self)
        bare.value_head = bare.states = bare.balance = None
        return bare

    @property
    def vocabulary(self) -> int:
        """How many tokens there are a probability for."""
        return self._head.shape[0]

    def pass_tokens(self, batch: TreeBatch) -> int:
        """Of the largest pass that a tree takes, on whatever rank."""
        if self._group is None:
            return batch.pass_tokens
        return max(end - start for start, end in self._spans(batch, self._group))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that compute each tree together, if there are any."""
        return self._group

    def reduce_gradients(self) -> None:
        """Add up what the ranks of the group have, after all trees of a batch."""
        if self._group is not None:
            sum_gradients(self.model.parameters(), self._group)
            if self.balance is not None:
                shares = torch.tensor(self.balance.value, dtype=torch.float64)
                shares = shares.to(self.device)
                all_reduce(shares, self._group)
                self.balance.value = float(shares)
            if self.value_head is not None:
                sum_gradients(self.value_head.parameters(), self._group)

    def _edges(self, batch: TreeBatch) -> tuple[Tensor, Tensor]:
        if self.states is not None:
            self.states.begin(batch.tokens)
        if self.unmerged:
            return self._by_sequence(batch)
        if self._group is not None:
            return self._by_rank(batch, self._group)
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
        if self._group is not None:
            raise InvalidArgument(
                f"{type(self.model).__name__} cannot be trained by a group of ranks per tree: "
                f"{self.unmerged}"
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
        if self.balance is not None and not self.balance.sealed:
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
        """One pass through the model; `count` unless it was made before."""
        head = part.head.to(self.device)
        inputs: dict[str, Any] = {"input_ids": part.ids_L.to(self.device)[None], "use_cache": False}
        if self.balance is not None:
            inputs["output_router_logits"] = True
        with torch.autocast(
            self.device.type, dtype=self.autocast, enabled=self.autocast is not None
        ):
            if self.unmerged:
                wanted = self.value_head is not None or self.states is not None
                trunk, logits_RV = self._trunk.with_head(inputs, head.places_R, states=wanted)
            else:
                inputs["position_ids"] = part.positions_L.to(self.device)[None]
                inputs["tree"] = TreeInput(schedule=part.schedule, prefix=prefix)
                trunk = self._trunk(inputs, normed=self.states is not None)
        if self.unmerged:
            logprobs_E, entropy_R = logits_logprobs(logits_RV, head)
        else:
            scaled = head
            if self._logit_scale != 1.0:
                scaled = replace(head, temperatures_R=head.temperatures_R / self._logit_scale)
            logprobs_E, entropy_R = edge_logprobs(
                trunk.states_LC, self._head, scaled, norm=trunk.norm
            )
        if self.value_head is not None:
            logprobs_E = torch.stack([logprobs_E, self._values(trunk, head)], dim=1)
        if self.states is not None and trunk.normed_LC is not None and count:
            self.states.keep(part, trunk.normed_LC)
        mass_X = None
        if self.balance is not None:
            weights_L = part.weights_L.to(self.device)
            mass_X = self.balance.mass(trunk.router_logits, weights_L)
            if count:
                self.balance.count(trunk.router_logits, weights_L)
        return PassOutput(logprobs_E=logprobs_E, entropy_E=entropy_R[head.rows_E], mass_X=mass_X)

    def _values(self, trunk: TrunkOutput, head: HeadRows) -> Tensor:
        """[E]: of the state that each edge leaves from, in fp32 or wider like the log-probs."""
        assert self.value_head is not None
        with torch.autocast(self.device.type, enabled=False):
            states_RC = trunk.states_LC.index_select(0, head.places_R)
            if trunk.norm is not None:
                states_RC = trunk.norm(states_RC)
            wide = torch.promote_types(states_RC.dtype, torch.float32)
            weight, bias = self.value_head.weight.to(wide), self.value_head.bias.to(wide)
            values_R: Tensor = states_RC.to(wide) @ weight[0] + bias
        return values_R[head.rows_E]

    def _compute_sequences(self, reason: str) -> None:
        self.unmerged = reason
        self.model.set_attn_implementation(self._own_attention)
        log.warning(
            "%s is trained sequence by sequence, without merging prefixes: %s",
            type(self.model).__name__,
            reason,
        )

    @torch.no_grad()
    def check(self) -> None:
        """Compare a small forked tree, whole and relayed, with the model's own forward.

        A model that computes something else than causal attention over ancestors and a plain head
        (soft-capped logits, attention sinks) is trained sequence by sequence from then on.
        """
        if self.unmerged:
            return
        ids = [[3, 5, 7, 11, 13, 17], [3, 5, 7, 19, 23], [3, 5, 29, 31], [3, 5, 29, 31, 2]]
        samples = [_probe([token % self.vocabulary for token in one]) for one in ids]
        # In the master weights' own type: what autocast rounds differs with the shape of a pass.
        autocast, self.autocast = self.autocast, None
        group, self._group = self._group, None
        try:
            error = max(self._deviation(samples, budget) for budget in (1 << 30, 4))
            reason = f"merged log-probs differ from its own forward by {error:.3g}"
        except InvalidArgument as refusal:
            error, reason = float("inf"), str(refusal)
        finally:
            self.autocast, self._group = autocast, group
        # bf16 weights read about 0.02 here; a model that is not merged exactly, whole nats.
        allowed = 0.2 if self._head.dtype != torch.float32 else 1e-3
        if not error <= allowed:
            self._compute_sequences(reason)

    def _deviation(self, samples: Sequence[Sample], budget: int) -> float:
        """Largest difference of a log-prob from the model's own, in trees within a budget."""
        error = 0.0
        for plan in plan_trees(samples, token_budget=budget):
            merged_T, _ = self.logprobs(build_tree_batch(plan, samples, channels=self.channels))
            own_T = torch.cat([self._own_logprobs(samples[index]) for index in plan.samples])
            error = max(error, float((merged_T - own_T).abs().max()))
        return error

    def _own_logprobs(self, sample: Sample) -> Tensor:
        ids_L = torch.frombuffer(bytearray(sample.ids), dtype=torch.int32).long().to(self.device)
        self.model.set_attn_implementation(self._own_attention)
        try:
            with torch.autocast(self.device.type, enabled=False):
                logits_LV = self.model(input_ids=ids_L[None], use_cache=False).logits[0]
        finally:
            self.model.set_attn_implementation(TREE_ATTENTION)
        wide: Tensor = logits_LV[:-1].to(torch.promote_types(logits_LV.dtype, torch.float32))
        return wide.log_softmax(-1).gather(-1, ids_L[1:, None])[:, 0]


def _probe(ids: list[int]) -> Sample:
    columns = bytes(4 * (len(ids) - 1))
    return Sample(
        ids=array("i", ids).tobytes(),
        trained=((1, len(ids)),),
        behavior_logprobs=columns,
        weight_versions=columns,
        advantages=columns,
    )
