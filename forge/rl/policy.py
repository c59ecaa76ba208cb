"""A transformers causal language model as the policy being trained.

Owns the forward pass over a merged tree: trunk with tree attention, head on the rows needed.
Also owns the check that this equals the model's own forward, since only the model's code knows
what it computes. Losses and optimizer steps are elsewhere.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor

from forge.core.errors import InvalidArgument
from forge.core.packing import Sample, plan_trees
from forge.rl.logprobs import edge_logprobs
from forge.rl.tree_attention import TREE_ATTENTION, register
from forge.rl.tree_batch import TreeBatch, build_tree_batch


class TreePolicy:
    """Log-probs of tree-merged samples under a causal language model."""

    def __init__(self, model: Any, *, autocast: torch.dtype | None = None) -> None:
        """Takes over `model`'s attention implementation. `autocast` is the trunk's type, None
        for the parameters' own; the head is always fp32 or wider."""
        register()
        self._own_attention: str = model.config._attn_implementation
        model.set_attn_implementation(TREE_ATTENTION)
        self.model = model
        self.autocast = autocast
        config = model.config.get_text_config()
        self.channels = attention_channels(config)
        self._head: Tensor = model.get_output_embeddings().weight
        # Granite divides its logits, Cohere multiplies them.
        self._logit_scale = getattr(config, "logit_scale", None) or (
            1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        )

    def logprobs(self, batch: TreeBatch) -> tuple[Tensor, Tensor]:
        """Log-prob (differentiable) and entropy of the trained tokens, both [T]."""
        device = self._head.device.type
        with torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None):
            output = self.model.base_model(
                input_ids=batch.ids_L[None],
                position_ids=batch.positions_L[None],
                tree=batch.schedule,
                use_cache=False,
            )
        hidden_LC = output.last_hidden_state[0]
        if self._logit_scale != 1.0:
            hidden_LC = hidden_LC * self._logit_scale
        logprobs_E, entropy_R = edge_logprobs(hidden_LC, self._head, batch.head)
        entropy_E = entropy_R[batch.head.rows_E]
        return logprobs_E[batch.edges_T], entropy_E[batch.edges_T]

    @torch.no_grad()
    def check(self) -> None:
        """Compare a small forked tree with the model's own forward, sample by sample.

        Raises `InvalidArgument` for a model that computes something else than full causal
        attention and a plain head: state-space layers, sliding windows, soft-capped logits.
        """
        vocabulary = self._head.shape[0]
        ids = [[3, 5, 7, 11, 13, 17], [3, 5, 7, 19, 23], [3, 5, 29, 31], [3, 5, 29, 31, 2]]
        samples = [_probe([token % vocabulary for token in one]) for one in ids]
        (plan,) = plan_trees(samples, token_budget=1 << 30)
        # In the master weights' own type: what autocast rounds differs with the shape of a pass.
        autocast, self.autocast = self.autocast, None
        try:
            merged, _ = self.logprobs(build_tree_batch(plan, samples, channels=self.channels))
            expected = torch.cat([self._own_logprobs(samples[index]) for index in plan.samples])
        finally:
            self.autocast = autocast
        error = float((merged - expected).abs().max())
        # bf16 weights read about 0.02 here; a model that is not merged exactly, whole nats.
        allowed = 0.2 if self._head.dtype != torch.float32 else 1e-3
        if not error <= allowed:
            raise InvalidArgument(
                f"{type(self.model).__name__} cannot be trained on merged trees: log-probs differ "
                f"from its own forward by {error:.3g} (allowed {allowed:g})"
            )

    def _own_logprobs(self, sample: Sample) -> Tensor:
        ids_L = torch.frombuffer(bytearray(sample.ids), dtype=torch.int32).long()
        device = self._head.device.type
        self.model.set_attn_implementation(self._own_attention)
        try:
            with torch.autocast(device, enabled=False):
                logits_LV = self.model(input_ids=ids_L[None], use_cache=False).logits[0]
        finally:
            self.model.set_attn_implementation(TREE_ATTENTION)
        wide: Tensor = logits_LV[:-1].to(torch.promote_types(logits_LV.dtype, torch.float32))
        return wide.log_softmax(-1).gather(-1, ids_L[1:, None])[:, 0]


def attention_channels(config: Any) -> int:
    """Query heads times head size of a transformers configuration."""
    text = config.get_text_config()
    heads: int = text.num_attention_heads
    size: int = getattr(text, "head_dim", None) or text.hidden_size // heads
    return heads * size


def _probe(ids: list[int]) -> Sample:
    columns = bytes(4 * (len(ids) - 1))
    return Sample(
        ids=array("i", ids).tobytes(),
        trained=((1, len(ids)),),
        behavior_logprobs=columns,
        weight_versions=columns,
        advantages=columns,
    )
