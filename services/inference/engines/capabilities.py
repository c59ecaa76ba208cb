"""Capabilities of an engine: declared by the engine, checked for each request, tested one by one.

Not here: the check of a request; see `refusals`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import msgspec

Role = Literal["prefill", "decode", "both"]
EARLY_HAND_OFF = "kv_blocks_early"
"""The kind of hand-off in blocks, each as soon as it is computed; see `EarlyPrefillEngine`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The abilities of one engine. Requests may only ask for declared abilities."""

    engine: str
    """Name of the engine, for errors."""
    roles: frozenset[Role]
    hand_offs: frozenset[str] = frozenset()
    """Kinds of keys and values that it sends and takes. Without the kind of the sender it reads the
    prompt again."""
    logprobs: Literal["sampled"] = "sampled"
    """The distribution of `Tokens.logprobs`: the one that was sampled from. Training needs it, so
    there is no other kind."""
    shares: bool = False
    """Fills `Tokens.allowed` for requests that reshape the distribution. Without it training leaves
    the turns of such requests out."""
    update: Literal["in_flight", "drain"]
    """Whether requests continue under new weights, or finish under the old ones first."""
    recomputes: bool = False
    """Can end running answers at a swap of weights, so that the router has them computed again
    (`kv.on_update = "recompute"`)."""
    draws: Literal["positional", "stream"]
    """Whether seed and position determine a draw, so that a moved request gets the same tokens; or
    seed and all draws before it."""
    cuts: bool = False
    """top_p, top_k and min_p."""
    min_tokens: bool = False
    penalties: bool = False
    """Presence, frequency and repetition penalties, and logit_bias."""
    grammars: frozenset[str] = frozenset()
    """Kinds of `Grammar`."""
    resumes: frozenset[Literal["grammar", "penalties"]] = frozenset()
    """Features that it continues after tokens of the answer in the prompt, as in a request that
    moved."""
    top_logprobs: int = 0
    """Most tokens per position."""
    routed_experts: bool = False
    """Records the experts of each token, for the model that it runs. Requests that ask for them are
    served without it, too: their tokens then have none."""
    drafts: bool = False
    """Drafts with the draft heads among the weights, which changes no distribution. Without it they
    are left out."""
    cache_events: bool = False
    """Reports its prefix cache, see `CacheReports`."""

    def encode(self) -> str:
        """Return them as JSON, for the directory entry of a worker."""
        return msgspec.json.encode(self, order="deterministic").decode()

    @classmethod
    def decode(cls, text: str) -> Capabilities:
        """Read `encode`; fields that this release does not know are ignored. Raises ValueError for
        another form, and for values that this release does not know."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"capabilities {text[:200]!r}: {error}") from None

    def described(self) -> str:
        """Return the abilities in one line, for the log."""
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "engine" or not value:
                continue
            if isinstance(value, frozenset):
                value = "+".join(sorted(value))
            words.append(field.name if value is True else f"{field.name}={value}")
        return " ".join(words)
