"""Replaces sampling parameters of an agent by those of its session's policy.

An agent that asks for temperature 0, or for the same seed in every rollout of a group, leaves
nothing to train on. Owns the rule; the session's token has the policy, the scheduler chose it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from forge.v1.common_pb2 import SamplingParams
from services.gateway.config import SamplingBounds
from services.gateway.conversation.turn_request import (
    RESHAPING,
    TurnRequest,
    reshaping_values,
    sampling_values,
)
from services.gateway.metrics import SAMPLING_CHANGES

SAMPLING_HEADER = "X-Forge-Sampling"
"""Response header that names each changed parameter, its value and the agent's."""


def with_policy(request: TurnRequest, policy: str, bounds: SamplingBounds) -> TurnRequest:
    """Returns the request with the parameters of the policy "agent" (or ""), "bound" or "override".

    Changes are named in the headers of the response.
    """
    if policy not in ("bound", "override"):
        return request
    asked, used = request.sampling, SamplingParams()
    used.CopyFrom(asked)
    for field in ("temperature", "top_p", "top_k", "seed", *RESHAPING):
        used.ClearField(field)
    if policy == "bound":
        _bound(used, asked, bounds)
    changes = list(_changes(asked, used))
    if not changes:
        return request
    for parameter, _ in changes:
        SAMPLING_CHANGES.labels(policy, parameter).inc()
    request.headers[SAMPLING_HEADER] = ", ".join(text for _, text in changes)
    return replace(request, sampling=used, asked=asked)


def _bound(used: SamplingParams, asked: SamplingParams, bounds: SamplingBounds) -> None:
    wanted = sampling_values(asked)
    temperature = max(wanted["temperature"], bounds.min_temperature)
    used.temperature = min(temperature, bounds.max_temperature)
    used.top_p = max(wanted["top_p"], bounds.min_top_p)
    used.top_k = max(asked.top_k, bounds.min_top_k) if asked.top_k else 0


def _changes(asked: SamplingParams, used: SamplingParams) -> Iterator[tuple[str, str]]:
    """Yields each changed parameter with its text."""
    for (name, before), after in zip(
        sampling_values(asked).items(), sampling_values(used).values(), strict=True
    ):
        if before != after:
            yield name, f"{name}={after:g} (asked {before:g})"
    for name, value in reshaping_values(asked).items():
        shown = f"{value} tokens" if name == "logit_bias" else f"{value:g}"
        yield name, f"{name}=none (asked {shown})"
    if asked.HasField("seed"):
        yield "seed", f"seed=random (asked {asked.seed})"
