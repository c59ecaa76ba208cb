"""One request in vLLM: how it begins and ends here, and its outputs as pieces."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from services.inference.engines.base import Piece, Prompt
from services.inference.engines.vllm import sampling
from services.inference.engines.vllm.exchange.expert_rows import ExpertRows


@dataclass(slots=True, kw_only=True)
class Leg:
    """One leg of a request: its input from the leg before, and its output for the next one."""

    first: tuple[int, ...] = ()
    """Tokens that the answer begins with: prefill has sampled them."""
    transfer: dict[str, Any] = field(default_factory=dict)
    """vLLM's kv_transfer_params; empty for none."""
    version: int = 0
    """Version of the weights of the keys and values that arrive."""
    salt: str = ""
    """Set at the begin: marks the load of weights with which the request begins."""
    returned: dict[str, Any] | None = None
    """Set at the end: what vLLM gives to the next leg."""
    rows: ExpertRows | None = None
    """Experts of its tokens, if it asks for them."""

    def close(self) -> None:
        """Free what the request had."""
        if self.rows is not None:
            self.rows.close()


def versions_in(completion: Any, state: Any, sampled: int) -> list[int]:
    """Return the version of each new token, after `sampled` ones. `state`: vLLM's, None for a
    request that ended before it was found."""
    if state is not None:
        starts = state.weight_version_starts
    else:
        starts = [(span.version, span.start) for span in completion.weight_versions or ()]
    return sampling.versions_of(starts, sampled, len(completion.token_ids))


def to_piece(
    output: Any, prompt: Prompt, versions: list[int], *, sampled: int, rows: ExpertRows | None
) -> Piece:
    """Return the piece of an output. `sampled`: tokens with those of this piece."""
    completion = output.outputs[0]
    tokens = sampling.to_tokens(completion, prompt.sampling, versions)
    finish = sampling.to_finish(completion.finish_reason)
    if finish is not None and rows is not None:
        tokens = replace(tokens, routes=rows.read(prompt.tokens + sampled - 1))
    begins = sampled == len(versions)
    cached_tokens = (output.num_cached_tokens or 0) if begins else 0
    return Piece(tokens=tokens, finish=finish, cached_tokens=cached_tokens)
