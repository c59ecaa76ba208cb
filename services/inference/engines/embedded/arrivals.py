"""Tensors of a hand-off, for the engine that decodes."""

from __future__ import annotations

from functools import partial

import torch

from services.inference.engines.base import KvSpan
from services.inference.engines.embedded.memory_shortage import attempt, refusal
from services.inference.engines.embedded.messages import HeldPrompt
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.tensor_bytes import from_bytes


class Arrivals:
    """The hand-offs to one model, checked by `KvShape.check`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def keys_and_values(self, span: KvSpan, request_id: str) -> torch.Tensor:
        """[layers, 2, heads, tokens, head_size], of the tokens of the span. Raises
        ResourceExhausted without memory for them."""
        tried = attempt(partial(self._on_device, span), self._policy.device)
        if tried.result is None:
            size = f"a hand-off of {span.tokens} tokens"
            raise refusal("decode", request_id, size=size, shortage=tried.shortage)
        return tried.result

    def _on_device(self, span: KvSpan) -> torch.Tensor:
        if isinstance(span.kept, HeldPrompt):
            own = span.kept.kv[:, :, :, span.from_token :]
            # A view would keep the memory of the whole prompt.
            return own.clone() if span.tokens < span.from_token else own
        fetched = from_bytes(span.data, dtype=span.dtype, shape=span.shape)
        return fetched.to(self._policy.device)

    def recurrent(self, span: KvSpan) -> torch.Tensor | None:
        """Recurrent states of the span, as `HeldPrompt.recurrent`."""
        if isinstance(span.kept, HeldPrompt):
            return span.kept.recurrent
        if not span.recurrent:
            return None
        shape = (1, len(span.recurrent))
        return from_bytes(span.recurrent, dtype="uint8", shape=shape).to(self._policy.device)

    def routes(self, span: KvSpan) -> torch.Tensor:
        """The experts of its tokens, a row each."""
        shape = self._policy.kv_shape
        if not span.routes:
            return shape.unknown_routes(span.tokens)
        rows = torch.frombuffer(bytearray(span.routes), dtype=torch.uint8)
        return rows.view(span.tokens, shape.route_bytes)

    def state(self, span: KvSpan) -> torch.Tensor | None:
        """The hidden state behind the prompt; None without a fitting one, which only delays drafts
        by a step."""
        policy = self._policy
        if isinstance(span.kept, HeldPrompt):
            return span.kept.state if policy.drafts is not None else None
        fitting = len(span.last_state) == policy.head.channels * policy.dtype.itemsize
        if policy.drafts is None or not span.last_state or not fitting:
            return None
        state = from_bytes(span.last_state, dtype=span.dtype, shape=(policy.head.channels,))
        return state.to(policy.device)
