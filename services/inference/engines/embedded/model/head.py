"""The end of a model: from last hidden states to logits, of the policy and of its draft heads.

Owns the states of the last pass and the use of the draft heads (`forge.rl.mtp`), which read the
model's own embedding and head; both change with its weights. Not here: which drafts are kept.

Shapes: R rows, C hidden channels, V vocabulary, S tokens of a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from forge.core.errors import InvalidArgument
from forge.rl.model.capabilities import logits_of
from forge.rl.mtp.heads import MtpHead, MtpHeads
from forge.rl.sampling import TokenSubset
from services.inference.engines.embedded.model.device_weights import host_copy, overwrite
from services.inference.engines.embedded.model.packed_linears import (
    is_worth,
    pack,
    packable,
    placeholder,
    product,
)
from services.inference.engines.tensor_bytes import is_finite


class ModelHead:
    """The language-model head of one model, and the states that it read last."""

    def __init__(self, model: Any) -> None:
        head = model.get_output_embeddings()
        weight = getattr(head, "weight", None)
        self._weight: torch.Tensor | None = weight if isinstance(weight, torch.Tensor) else None
        self._embedding: torch.nn.Module = model.get_input_embeddings()
        self._form = logits_of(model)
        self.channels: int = 0 if self._weight is None else self._weight.shape[1]
        """Width of the states; 0 for a model without a separate head."""
        self.states = torch.zeros(0, self.channels)
        """[R, C], of the rows of the last logits."""
        if self._weight is not None:
            head.register_forward_pre_hook(self._keep)

    def _keep(self, _: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        self.states = given[0].flatten(0, -2)

    def reads(self, weight: torch.Tensor) -> bool:
        """Whether draft heads or the embedding read this matrix."""
        return weight is self._weight or weight is getattr(self._embedding, "weight", None)

    def stage_drafts(self, tensors: Mapping[str, torch.Tensor], *, most: int) -> DraftHeads:
        """Return at most `most` draft heads that use these tensors. Raises InvalidArgument for
        heads of another model and for NaN or infinity."""
        embedding = self._embedding.weight
        assert isinstance(embedding, torch.Tensor)
        heads = MtpHeads.of(tensors, channels=self.channels, embedding_channels=embedding.shape[1])
        if not all(is_finite(one) for one in tensors.values()):
            raise InvalidArgument("MTP heads have NaN or infinity")
        return DraftHeads(self, list(heads)[:most])

    def embed(self, ids_R: torch.Tensor) -> torch.Tensor:
        """The model's embeddings of tokens, [R, C]."""
        embedded: torch.Tensor = self._embedding(ids_R)
        return embedded

    def rows(self, among: TokenSubset, dtype: torch.dtype) -> HeadRows:
        """A copy of the rows of these tokens, in this type."""
        assert self._weight is not None
        weight_SC = self._weight[among.tokens_S].to(dtype)
        bias_V = self._form.bias_V
        bias_S = None if bias_V is None else bias_V[among.tokens_S].to(dtype)
        if is_worth(weight_SC):
            compute = partial(product, packed=pack(weight_SC), bias=bias_S)
        else:
            compute = partial(linear, weight=weight_SC, bias=bias_S)
        return HeadRows(among=among, dtype=dtype, compute=compute)

    def logits(self, states_RC: torch.Tensor, rows: HeadRows | None = None) -> torch.Tensor:
        """Logits [R, V] from states, float32, as the training of the heads computes them; or those
        of some rows alone, [R, S]."""
        if rows is not None:
            logits_RV = rows.compute(states_RC.to(rows.dtype)).float()
        else:
            assert self._weight is not None
            wide_RC = states_RC.to(self._weight.dtype)
            logits_RV = linear(wide_RC, self._weight, self._form.bias_V).float()
        if self._form.scale != 1.0:
            logits_RV = logits_RV * self._form.scale
        if self._form.softcap:
            logits_RV = torch.tanh(logits_RV / self._form.softcap) * self._form.softcap
        return logits_RV


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRows:
    """Rows of one version of the language-model head."""

    among: TokenSubset
    dtype: torch.dtype
    compute: Callable[[torch.Tensor], torch.Tensor]
    """From states [R, C] of this type to [R, S]."""


class DraftHeads:
    """The draft heads of one version of the weights."""

    def __init__(self, head: ModelHead, heads: Sequence[torch.nn.Module]) -> None:
        self._head = head
        self._heads = list(heads)
        self._rows: HeadRows | None = None
        """Copied for the last part of the vocabulary from the weights of this version."""

    def __len__(self) -> int:
        return len(self._heads)

    def draft(
        self,
        number: int,
        states_RC: torch.Tensor,
        ids_R: torch.Tensor,
        among: TokenSubset | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Head `number`, from 0: its states [R, C] and logits [R, V], after the tokens `ids_R`; the
        states before are those of the head before it, or the model's own for head 0. `among`: the
        logits of these tokens alone; call it only while this version of the weights is served."""
        head = self._heads[number]
        assert isinstance(head, MtpHead)
        kind = head.fuse.weight.dtype
        if among is None:
            self._rows = None
        elif self._rows is None or self._rows.among is not among:
            self._rows = self._head.rows(among, kind)
        states_RC = head(states_RC.to(kind), self._head.embed(ids_R).to(kind))
        return states_RC, self._head.logits(head.out_norm(states_RC), self._rows)

    def tensors(self) -> list[torch.Tensor]:
        """All weights, in their order."""
        return [one.data for head in self._heads for one in head.parameters()]

    def pack(self) -> None:
        """Replace matrices by packed ones where products gain by it; then there is no copy."""
        for head in self._heads:
            for layer in packable(head):
                layer.serve(pack(layer.weight))
                layer.weight.data = placeholder(layer.weight)

    def on(self, device: torch.device, dtype: torch.dtype) -> DraftHeads:
        """A copy on this device, in this type."""
        return DraftHeads(self._head, [deepcopy(one).to(device, dtype) for one in self._heads])


class ServedDrafts:
    """The draft heads that a policy serves. A GPU has one copy, which staged heads overwrite: their
    graphs read it by its addresses."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.heads: DraftHeads | None = None
        """None without any."""
        self._dtype = dtype
        self._device = device
        self._staged: DraftHeads | None = None
        """The served ones as they were staged."""

    @property
    def _overwrites(self) -> bool:
        return self._device.type == "cuda"

    def staged(self, received: torch.Tensor) -> torch.Tensor:
        """A tensor of heads as it waits: in the host's memory on a GPU."""
        if self._overwrites:
            return host_copy(received, self._dtype)
        return received.to(dtype=self._dtype, device=self._device)

    def pack(self, heads: DraftHeads) -> None:
        """Bring staged matrices into the layout of a CPU's products."""
        if not self._overwrites:
            heads.pack()

    def swap(self, staged: DraftHeads | None) -> DraftHeads | None:
        """Serve `staged`; returns the heads served before, as they were staged."""
        before = self._staged
        if not self._overwrites or staged is None:
            self.heads = staged
        elif self.heads is not None and len(self.heads) == len(staged):
            overwrite(self.heads.tensors(), staged.tensors())
        else:
            self.heads = staged.on(self._device, self._dtype)
        self._staged = staged
        return before
