"""The draft heads: each drafts one token beyond the head before it.

Owns their modules and tensor names. With h the backbone's last hidden state, E the model's
embedding and W its language-model head, all detached, head k (from 1) computes:

    g_0(t) = h_t
    x      = F_k [norm(g_{k-1}(t - 1)); norm(E(o_t))]
    g_k(t) = x + SwiGLU(norm(x))
    q_k(. | o_<=t) = softmax(W norm(g_k(t)) / temperature)

so q_k is the distribution of o_{t+1}, given the backbone's state k tokens earlier and the k tokens
since. This is the chain of DeepSeek-V3's MTP modules (arXiv 2412.19437, section 2.2) without
attention, as in Hydra (arXiv 2402.05109): h already contains the context, so drafting needs no KV
cache. A head's state depends on one path alone, so a merged tree has one per token.

Shapes: R rows, C hidden channels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from forge.core.errors import InvalidArgument
from forge.rl.model.shapes import difference

PREFIX = "mtp."
"""Prefix of the names of the heads' tensors among published weights."""
INNER_RATIO = 2
"""Width of the feed-forward layer over the width of the hidden states."""
EPSILON = 1e-6


class MtpHead(nn.Module):
    """One draft head."""

    def __init__(self, channels: int, embedding_channels: int) -> None:
        super().__init__()
        inner = INNER_RATIO * channels
        self.state_norm = nn.RMSNorm(channels, eps=EPSILON)
        self.token_norm = nn.RMSNorm(embedding_channels, eps=EPSILON)
        self.fuse = nn.Linear(channels + embedding_channels, channels, bias=False)
        self.mlp_norm = nn.RMSNorm(channels, eps=EPSILON)
        self.gate = nn.Linear(channels, inner, bias=False)
        self.up = nn.Linear(channels, inner, bias=False)
        self.down = nn.Linear(inner, channels, bias=False)
        self.out_norm = nn.RMSNorm(channels, eps=EPSILON)

    def forward(self, states_RC: Tensor, embeddings_RC: Tensor) -> Tensor:
        """The next state, from the state one token back and the embedding of the next token."""
        joined = torch.cat([self.state_norm(states_RC), self.token_norm(embeddings_RC)], dim=-1)
        fused_RC = self.fuse(joined)
        normed_RC = self.mlp_norm(fused_RC)
        gated = nn.functional.silu(self.gate(normed_RC)) * self.up(normed_RC)
        out: Tensor = fused_RC + self.down(gated)
        return out


class MtpHeads(nn.ModuleList):
    """Heads 1, 2, ...: each continues from the state of the head before it."""

    def __init__(self, count: int, *, channels: int, embedding_channels: int) -> None:
        super().__init__([MtpHead(channels, embedding_channels) for _ in range(count)])

    @classmethod
    def of(
        cls, tensors: Mapping[str, Tensor], *, channels: int, embedding_channels: int
    ) -> MtpHeads:
        """Heads that use these tensors of `named_tensors`, without a copy. Raises like `check`."""
        numbers = {name.removeprefix(PREFIX).partition(".")[0] for name in tensors}
        with torch.device("meta"):
            heads = cls(len(numbers), channels=channels, embedding_channels=embedding_channels)
        heads.check(tensors)
        own = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
        heads.load_state_dict(own, assign=True)
        return heads.requires_grad_(False).eval()

    def named_tensors(self) -> dict[str, Tensor]:
        """`mtp.<k from 0>.<weight>`: the tensors themselves, not copies."""
        return {PREFIX + name: tensor for name, tensor in self.state_dict().items()}

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises `InvalidArgument` when the tensors have other names or shapes."""
        odd = difference(
            self.named_tensors(), {name: tensor.shape for name, tensor in tensors.items()}
        )
        if odd:
            raise InvalidArgument(f"MTP heads do not fit: {odd}")

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load tensors of `named_tensors`. Raises like `check`."""
        self.check(tensors)
        self.load_state_dict({name.removeprefix(PREFIX): one for name, one in tensors.items()})
