"""The hand-off of a prompt from a prefill to a decode engine, as bytes.

Carries the library's DisaggregatedParams. The keys and values themselves go through the library's
transceiver, from GPU to GPU.
"""

from __future__ import annotations

from typing import Any

import msgspec

from forge.core.errors import DataLoss
from services.inference.engines.tensorrt_llm.library.library import Library

FINGERPRINT = b"tensorrt_llm/1"
"""Tells a hand-off of this engine from keys and values of another."""


class HandOff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prefilled prompt."""

    weight_version: int
    prompt_tokens: int
    first_tokens: tuple[int, ...]
    first_logprobs: tuple[tuple[tuple[int, float, int | None], ...], ...]
    """For each first token: token, log-prob and rank of each entry."""
    opaque_state: bytes
    request_id: int
    """The id that prefill returned, which after a retry there may be another than it was given."""
    context_request_id: int | None = None
    draft_tokens: tuple[int, ...] | None = None
    context_dp_rank: int | None = None
    context_endpoint: str | tuple[str, ...] | None = None
    """One, or by version one of each rank."""
    schedule_style: int | None = None


def write_hand_off(params: Any, *, weight_version: int, prompt_tokens: int) -> bytes:
    """Encode the DisaggregatedParams that prefill returned."""
    beams = params.first_gen_log_probs or [()]
    style = params.schedule_style
    return msgspec.msgpack.encode(
        HandOff(
            weight_version=weight_version,
            prompt_tokens=prompt_tokens,
            first_tokens=tuple(params.first_gen_tokens),
            first_logprobs=tuple(
                tuple((token, float(one.logprob), one.rank) for token, one in entry.items())
                for entry in beams[0]
            ),
            opaque_state=params.opaque_state,
            request_id=params.disagg_request_id,
            context_request_id=params.ctx_request_id,
            draft_tokens=None if params.draft_tokens is None else tuple(params.draft_tokens),
            context_dp_rank=params.ctx_dp_rank,
            context_endpoint=_frozen(params.ctx_info_endpoint),
            schedule_style=None if style is None else int(style),
        )
    )


def read_hand_off(data: bytes | memoryview) -> HandOff:
    """Decode a hand-off. Raises `DataLoss`."""
    try:
        return msgspec.msgpack.decode(data, type=HandOff)
    except msgspec.MsgspecError as error:
        raise DataLoss(f"hand-off of tensorrt_llm cannot be read: {error}") from None


def generation_params(library: Library, hand_off: HandOff) -> Any:
    """Return new DisaggregatedParams for the decode engine."""
    return library.disaggregated_params(
        request_type="generation_only",
        first_gen_tokens=list(hand_off.first_tokens),
        first_gen_log_probs=[
            [
                {token: library.logprob(logprob, rank) for token, logprob, rank in entry}
                for entry in hand_off.first_logprobs
            ]
        ],
        ctx_request_id=hand_off.context_request_id,
        opaque_state=hand_off.opaque_state,
        draft_tokens=None if hand_off.draft_tokens is None else list(hand_off.draft_tokens),
        disagg_request_id=hand_off.request_id,
        ctx_dp_rank=hand_off.context_dp_rank,
        ctx_info_endpoint=_as_given(hand_off.context_endpoint),
        schedule_style=hand_off.schedule_style,
    )


def _frozen(endpoint: str | list[str] | None) -> str | tuple[str, ...] | None:
    return tuple(endpoint) if isinstance(endpoint, list) else endpoint


def _as_given(endpoint: str | tuple[str, ...] | None) -> str | list[str] | None:
    return list(endpoint) if isinstance(endpoint, tuple) else endpoint


def context_params(library: Library, request_id: int) -> Any:
    """Return new DisaggregatedParams for the prefill engine."""
    return library.disaggregated_params(request_type="context_only", disagg_request_id=request_id)
