"""What goes from a prefill to a decode engine; an object may be used once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.support.inference.tensorrt_llm_fake.behaviour import misuse

_TYPES = ("context_only", "generation_only", "context_and_generation")


@dataclass(kw_only=True)
class DisaggregatedParams:
    """See the library."""

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[Any] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | list[str] | None = None
    schedule_style: int | None = None

    def __post_init__(self) -> None:
        """Refuse what the library refuses."""
        self._used = False
        if self.request_type not in _TYPES:
            raise ValueError(f"Unknown request type: {self.request_type}")

    def use(self) -> None:
        """Note the use."""
        if self._used:
            raise misuse("a DisaggregatedParams object serves two requests")
        self._used = True
        if self.disagg_request_id is None:
            raise misuse("a hand-off without disagg_request_id")
