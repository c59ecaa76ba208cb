"""Checks that the library computes the trainer's log-probs with new weights.

The library returns the log-probs of a prompt's tokens; each is looked up by its token, since the
versions differ in how many places the list has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forge.runtime.telemetry import log
from services.inference.engines import probes
from services.inference.engines.base import ModelLimits, Probe
from services.inference.engines.tensorrt_llm.library.library import Library
from services.inference.engines.tensorrt_llm.library.surface import Feature
from services.inference.engines.tensorrt_llm.requests import NO_END


async def check_probe(
    engine: Any,
    library: Library,
    probe: Probe | None,
    *,
    version: int,
    limits: ModelLimits,
    rounded_tolerance: float | None,
) -> None:
    """Compare the log-probs of the weights of the library's `engine`, which are `version` and serve
    no request yet, with `probe` by the rule of all engines. Raises `UnfitWeights` for other
    log-probs, `BrokenWeights` for NaN or infinity. A library without log-probs of prompts logs a
    warning in place of the check. `rounded_tolerance`: largest mean error, in nats, of a version
    that is published or served in 16 bits or fewer; None for any other."""
    ids, probe = probes.computed_before_a_token(probe, limits, version=version)
    found = None
    if Feature.PROBE in library.features:
        found = await _logprobs(engine, library, ids, version)
    if found is None:
        log.warning("tensorrt_llm_weights_not_probed", weight_version=version)
        return
    rounded = rounded_tolerance is not None
    tolerance = rounded_tolerance or probes.ROUNDED_TOLERANCE
    probes.check_probe(probe, found, version=version, rounded=rounded, rounded_tolerance=tolerance)


async def _logprobs(
    engine: Any, library: Library, ids: Sequence[int], version: int
) -> list[float] | None:
    """Return the log-probs of all tokens but the first; None if the library returns none."""
    params = library.sampling_params(
        max_tokens=1, end_id=NO_END, prompt_logprobs=0, seed=0, detokenize=False
    )
    arguments: dict[str, Any] = {"inputs": list(ids), "sampling_params": params}
    if Feature.CACHE_SALT in library.features:
        # Cached blocks have no log-probs.
        arguments["cache_salt"] = f"probe-{version}"
    result = await engine.generate_async(**arguments)
    return aligned(result.outputs[0].prompt_logprobs, ids[1:])


def aligned(
    entries: Sequence[Mapping[int, Any] | None] | None, ids: Sequence[int]
) -> list[float] | None:
    """Return the log-probs of `ids`, which follow each other somewhere in `entries`; None if they
    do not."""
    entries = entries or ()
    for start in range(len(entries) - len(ids) + 1):
        part = entries[start : start + len(ids)]
        pairs = list(zip(part, ids, strict=True))
        if all(entry is not None and token in entry for entry, token in pairs):
            return [float(entry[token].logprob) for entry, token in pairs if entry is not None]
    return None
