"""Orders of a request to our sampler in vLLM, beyond vLLM's parameters; see `answer_logits`."""

from __future__ import annotations

from typing import Any

import msgspec

ORDERS = "forge"
"""Key of `Orders` in `SamplingParams.extra_args`."""
OWN = -1
"""In place of a token id: the entry with the log-prob in the model's own distribution."""


class Orders(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of one request."""

    first: tuple[int, ...] = ()
    """Sampled by prefill: the answer begins with them."""
    answered: int = 0
    """Tokens at the end of the prompt that presence and frequency count."""
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    grammar: tuple[str, str, bool] | None = None
    """Kind, text and leniency."""
    matched: int = 0
    """Tokens at the end of the prompt that the grammar has matched."""
    stop_ids: tuple[int, ...] = ()
    scale: float = 1.0
    """Factor of the logits before vLLM divides them by its temperature, which is bounded."""
    own: bool = False
    """Whether to return the log-prob in the model's own distribution, as entry `OWN`; -inf if the
    grammar cannot be followed."""

    def extra_args(self) -> dict[str, Any]:
        """Encode them."""
        return {ORDERS: msgspec.to_builtins(self)}
