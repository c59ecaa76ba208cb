"""The layers of prefill passes on a GPU: fused, if they compute what the model's own compute."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from forge.core.errors import first_line
from forge.core.token_columns import int32_bytes
from forge.runtime.telemetry import log
from services.inference.engines.base import Prompt, Sampling
from services.inference.engines.embedded.device.fused_layers import FusedLayers, tolerated_error
from services.inference.engines.embedded.kv.device_attention import PackedAttention
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.prefill_pass import PrefillPass
from services.inference.engines.embedded.prefill_schedule import Reading, Span

_CHECK_TOKENS = 61
"""A prime: layers are compiled for passes of any length only if the first has no size of theirs."""


class PromptLayers:
    """The layers of one policy."""

    def __init__(self, policy: Policy, packed: PackedAttention | None = None) -> None:
        """`packed`: as of `PrefillPass`. Models with recurrent layers keep their own layers."""
        self._policy = policy
        self._packed = packed
        self._fused: FusedLayers | None = None
        self._is_checked = policy.kv_shape.states is not None

    def used(self) -> AbstractContextManager[None]:
        """Within, passes use the fused layers, if they have been found right."""
        return nullcontext() if self._fused is None else self._fused.used()

    def after_swap(self) -> None:
        """With the first weights, compile the layers and compare them with the model's own."""
        if self._is_checked:
            return
        self._is_checked = True
        fused = FusedLayers(self._policy.module)
        try:
            error = self._difference(fused)
        except RuntimeError as failure:
            reason = first_line(failure)
        else:
            if error <= tolerated_error(self._policy.dtype):
                log.info("fused_prefill_used", log_prob_error=error)
                self._fused = fused
                return
            reason = f"its log-probs differ by {error:.3g} nats"
        log.warning("fused_prefill_refused", reason=reason)

    @torch.inference_mode()
    def _difference(self, fused: FusedLayers) -> float:
        """The mean difference of log-probs between fused and plain layers."""
        expected_NV = self._logprobs()
        with fused.used():
            found_NV = self._logprobs()
        return float((found_NV - expected_NV).abs().mean())

    def _logprobs(self) -> torch.Tensor:
        """Log-probs of one prompt, by a pass like all others: the kind of a pass is compiled in."""
        shape, device = self._policy.kv_shape, self._policy.device
        ids = [7 * place % self._policy.limits.vocabulary for place in range(_CHECK_TOKENS)]
        prompt = Prompt(
            request_id="",
            ids=int32_bytes(ids),
            sampling=Sampling(
                temperature=1.0, top_p=1.0, top_k=0, max_tokens=1, stop_ids=frozenset(), seed=0
            ),
        )
        ids_N = torch.tensor(ids, device=device)
        reading = Reading(
            prompt=prompt,
            ids=ids_N,
            kv=shape.empty(len(ids)),
            routes=shape.unknown_routes(len(ids)),
            cached=0,
        )
        storage = PrefillPass([Span(reading=reading, start=0, end=len(ids))], self._packed)
        positions_N = torch.arange(len(ids), device=device)
        return self._policy.forward(ids_N, positions_N, storage).float().log_softmax(-1)
