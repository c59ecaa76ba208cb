"""The heads: each takes the draft one token further.

Owns their modules and their names. Head k (from 1) is, with h the trunk's last hidden state, E the
model's embedding, W its language-model head, all three detached:

    g_0(t) = h_t
    x      = F_k [norm(g_{k-1}(t - 1)); norm(E(o_t))]
    g_k(t) = x + SwiGLU(norm(x))
    q_k(. | o_<=t) = softmax(W norm(g_k(t)) / temperature)

so q_k is the distribution of o_{t+1} from the trunk's state k tokens earlier and the k tokens
since. This is the chain of DeepSeek-V3's MTP modules (arXiv 2412.19437, section 2.2) without
attention inside, as in Hydra (arXiv 2402.05109): h has read the context already, so drafting needs
no cache of its own. A head's state depends on one path alone, so on a merged tree there is one per
token, whatever branches there are.

Shapes: R rows, C hidden channels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from forge.core.errors import InvalidArgument
from forge.rl.model.shapes import difference

PREFIX = "mtp."
"""Of the heads' tensors, where they travel beside a model's own."""
INNER_RATIO = 2
"""Width of the feed-forward layer over that of the hidden states."""
EPSILON = 1e-6


class MtpHead(nn.Module):
    """One step further."""

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
        """The next state, from that one token back and the embedding of the token since."""
        joined = torch.cat([self.state_norm(states_RC), self.token_norm(embeddings_RC)], dim=-1)
        fused_RC = self.fuse(joined)
        normed_RC = self.mlp_norm(fused_RC)
        gated = nn.functional.silu(self.gate(normed_RC)) * self.up(normed_RC)
        out: Tensor = fused_RC + self.down(gated)
        return out


class MtpHeads(nn.ModuleList):
    """Head 1, 2, ...: each goes on from the state of the one before."""

    def __init__(self, count: int, *, channels: int, embedding_channels: int) -> None:
        super().__init__([MtpHead(channels, embedding_channels) for _ in range(count)])

    def named_tensors(self) -> dict[str, Tensor]:
        """`mtp.<k from 0>.<weight>`: the tensors themselves, not copies."""
        return {PREFIX + name: tensor for name, tensor in self.state_dict().items()}

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises `InvalidArgument` when what `named_tensors` gave is of other heads."""
        odd = difference(
            self.named_tensors(), {name: tensor.shape for name, tensor in tensors.items()}
        )
        if odd:
            raise InvalidArgument(f"MTP heads do not fit: {odd}")

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what `named_tensors` gave. Raises like `check`."""
        self.check(tensors)
        self.load_state_dict({name.removeprefix(PREFIX): one for name, one in tensors.items()})
