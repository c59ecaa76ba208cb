"""Tensors of a hand-off, for the engine that decodes.

Shapes: T tokens of the span.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from services.inference.engines.base import KvSpan
from services.inference.engines.embedded.memory_shortage import attempt, refusal
from services.inference.engines.embedded.messages import HeldPrompt
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.tensor_bytes import from_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivedTensors:
    """The part of a prompt after its match in the cache."""

    kv: torch.Tensor
    """[layers, 2, heads, T, head_size]."""
    recurrent: torch.Tensor | None
    """Recurrent states, as `HeldPrompt.recurrent`."""
    routes: torch.Tensor
    """Experts, [T, route_bytes], on the host."""
    state: torch.Tensor | None
    """The hidden state behind the prompt; None without a fitting one, which only delays drafts by a
    step."""


def arrived_tensors(policy: Policy, span: KvSpan, request_id: str) -> ArrivedTensors:
    """Decode a span that `KvShape.check` has passed. Raises ResourceExhausted without memory for
    its tensors."""
    tried = attempt(partial(_tensors, policy, span), policy.device)
    if tried.result is None:
        size = f"a hand-off of {span.tokens} tokens"
        raise refusal("decode", request_id, size=size, shortage=tried.shortage)
    return tried.result


def _tensors(policy: Policy, span: KvSpan) -> ArrivedTensors:
    if isinstance(held := span.kept, HeldPrompt):
        kv, recurrent = held.kv[:, :, :, span.from_token :], held.recurrent
        if span.tokens < span.from_token:
            # A view would keep the memory of the whole prompt.
            kv = kv.clone()
        state = held.state if policy.drafts is not None else None
    else:
        kv = from_bytes(span.data, dtype=span.dtype, shape=span.shape).to(policy.device)
        recurrent, state = _recurrent(policy, span), _state(policy, span)
    return ArrivedTensors(kv=kv, recurrent=recurrent, routes=_routes(policy, span), state=state)


def _recurrent(policy: Policy, span: KvSpan) -> torch.Tensor | None:
    if not span.recurrent:
        return None
    shape = (1, len(span.recurrent))
    return from_bytes(span.recurrent, dtype="uint8", shape=shape).to(policy.device)


def _routes(policy: Policy, span: KvSpan) -> torch.Tensor:
    shape = policy.kv_shape
    if not span.routes:
        return shape.unknown_routes(span.tokens)
    rows = torch.frombuffer(bytearray(span.routes), dtype=torch.uint8)
    return rows.view(span.tokens, shape.route_bytes)


def _state(policy: Policy, span: KvSpan) -> torch.Tensor | None:
    fitting = len(span.last_state) == policy.head.channels * policy.dtype.itemsize
    if policy.drafts is None or not span.last_state or not fitting:
        return None
    state = from_bytes(span.last_state, dtype=span.dtype, shape=(policy.head.channels,))
    return state.to(policy.device)
