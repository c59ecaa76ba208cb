"""An engine that samples one token."""

from __future__ import annotations

from typing import Any

from services.inference.engines.base import Likeliest, ModelLimits, Prefilled, Prompt, Tokens
from services.inference.engines.capabilities import Capabilities

LENIENT = {
    "roles": frozenset({"prefill"}),
    "update": "in_flight",
    "draws": "positional",
    "min_tokens": True,
}


class OneToken:
    limits = ModelLimits(context_tokens=100, vocabulary=100)

    def __init__(
        self, *, shares: bool = False, token: int = 4, top: tuple[Likeliest, ...] = ()
    ) -> None:
        able: Any = LENIENT
        self.capabilities = Capabilities(engine="one", shares=shares, **able)
        self._token = token
        self._top = top
        self.released: list[str] = []
        self._allowed = (-0.5,) if shares else ()

    async def prefill(self, prompt: Prompt, *, hold_s: float) -> Prefilled:
        allowed = self._allowed if prompt.sampling.reshapes else ()
        first = Tokens(
            ids=(self._token,), logprobs=(-1.0,), versions=(1,), allowed=allowed, top=self._top
        )
        return Prefilled(first=first, cached_tokens=0, queue_s=0.0, prefill_s=0.0)

    def release(self, request_id: str) -> None:
        self.released.append(request_id)
