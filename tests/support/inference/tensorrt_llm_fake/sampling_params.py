"""Parameters of one request; an object may be used once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from tests.support.inference.tensorrt_llm_fake.behaviour import behaviour, misuse


class LogprobMode(Enum):
    """Of which distribution log-probs are."""

    RAW = "raw"
    PROCESSED = "processed"


@dataclass(kw_only=True)
class SamplingParams:
    """See the library."""

    end_id: int | None = None
    max_tokens: int = 32
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_p: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobMode | None = None
    detokenize: bool = True

    def __post_init__(self) -> None:
        """Refuse what the library refuses."""
        self._used = False
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
        if self.temperature is not None and not self.temperature > 0:
            raise ValueError(f"require temperature > 0, got {self.temperature}")
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed {self.seed} is no uint64")
        if behaviour().is_old and self.logprobs_mode is not None:
            raise TypeError("unexpected keyword argument 'logprobs_mode'")

    def use(self) -> None:
        """Note the use; a second one has another's max_tokens."""
        if self._used:
            raise misuse("a SamplingParams object serves two requests")
        self._used = True

    @property
    def is_greedy(self) -> bool:
        """Greedy without any of the three."""
        return self.temperature is None and self.top_p is None and self.top_k is None

    @property
    def mode(self) -> Any:
        """The mode of log-probs."""
        return self.logprobs_mode or LogprobMode.RAW
