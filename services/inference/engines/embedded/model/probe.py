"""Checks new weights before they are served: they must compute the trainer's log-probs.

The probe of a publication has a few tokens and their log-probs. Weights are refused if they compute
other log-probs (bytes of another type, another model, a defect of an engine), NaN or infinity. A
second pass, in float32, compares weights in 16 bits with the trainer's forward on the same values.

Shape suffixes as in kv/attention.py; V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch

from forge.core.errors import ResourceExhausted
from forge.rl.model.capabilities import one_line
from forge.rl.numerics import without_tf32
from forge.runtime.telemetry import log
from services.inference.engines.base import Probe
from services.inference.engines.embedded.kv.attention import (
    Heads,
    attention,
    attention_bias,
    exact_type,
)
from services.inference.engines.embedded.memory_shortage import attempt
from services.inference.engines.embedded.model.policy import Policy, StagedWeights
from services.inference.engines.probes import check_probe, check_published, probe_ids

_RETRY_AFTER_S = 1.0
_ROUNDED_TOLERANCE = 0.12
"""Largest mean error of log-probs in 16 bits, in nats: this engine rounds matrices and their inputs
alone."""
_WIDE_TOLERANCE = 2e-4
"""The same in float32 over values in 16 bits, on any device. docs/benchmarks/numerics.md has the
errors on a CPU and on a GPU."""


def adopt(policy: Policy, staged: StagedWeights, probe: Probe | None) -> None:
    """Serve `staged` if it computes the log-probs of `probe`. After an error the weights served
    before stay. Raises UnfitWeights for other log-probs, BrokenWeights for NaN or infinity,
    ResourceExhausted without memory for the pass."""
    swapped = attempt(partial(policy.swap, staged), policy.device)
    before = swapped.result
    if before is None:
        raise _no_memory(staged, "their swap", swapped.shortage)
    try:
        check = partial(_check, policy, probe, staged)
        if shortage := attempt(check, policy.device).shortage:
            raise _no_memory(staged, "the pass of their probe", shortage)
    except BaseException:
        policy.swap(before)
        raise


def _no_memory(staged: StagedWeights, work: str, shortage: str) -> ResourceExhausted:
    return ResourceExhausted(
        f"weights {staged.version}: no memory for {work}: {shortage}",
        retry_after_s=_RETRY_AFTER_S,
    )


@torch.inference_mode()
def _check(policy: Policy, probe: Probe | None, staged: StagedWeights) -> None:
    version = policy.version
    ids = probe_ids(probe, policy.limits, version=version)
    found: list[float] = logprobs(policy, ids).tolist()
    check_probe(
        probe,
        found,
        version=version,
        rounded=staged.rounded,
        rounded_tolerance=_ROUNDED_TOLERANCE,
    )
    if probe is not None and probe.published and staged.as_published:
        _check_in_float32(policy, probe)


def _check_in_float32(policy: Policy, probe: Probe) -> None:
    """Compare with the trainer's forward on the same values, both without rounding: this finds
    faults as small as the rounding of 16 bits. A model that cannot run in float32 skips it."""
    try:
        tried = attempt(partial(_wide_logprobs, policy, probe.ids), policy.device)
        reason = tried.shortage
    except (RuntimeError, TypeError) as error:
        reason = one_line(error)
    if reason:
        log.warning("float32_probe_not_computed", weight_version=policy.version, reason=reason)
        return
    assert tried.result is not None
    check_published(probe, tried.result, version=policy.version, tolerance=_WIDE_TOLERANCE)


def _wide_logprobs(policy: Policy, ids: tuple[int, ...]) -> list[float]:
    with policy.in_float32(), without_tf32():
        found: list[float] = logprobs(policy, ids).tolist()
    return found


def logprobs(policy: Policy, ids: tuple[int, ...]) -> torch.Tensor:
    """Log-probs of all tokens but the first, by one pass over this sequence alone."""
    ids_N = torch.tensor(ids, device=policy.device)
    positions_N = torch.arange(len(ids), device=policy.device)
    logits_NV = policy.forward(ids_N, positions_N, _Alone())
    return logits_NV[:-1].float().log_softmax(-1).gather(-1, ids_N[1:, None])[:, 0]


class _Alone:
    """The KvPass over one whole sequence; stores nothing."""

    def attend(self, heads: Heads) -> torch.Tensor:
        """Causal attention within the window; see `KvPass`."""
        _, q_NQD, k_NHD, v_NHD, _, window, _, sinks_Q = heads.to(exact_type(heads.v_NHD))
        positions_N = torch.arange(len(q_NQD), device=q_NQD.device)
        bias_NN = attention_bias(positions_N, len(q_NQD), window=window, dtype=q_NQD.dtype)
        groups = q_NQD.shape[1] // k_NHD.shape[1]
        out_QND = attention(
            q_NQD.transpose(0, 1)[None],
            k_NHD.transpose(0, 1).repeat_interleave(groups, 0)[None],
            v_NHD.transpose(0, 1).repeat_interleave(groups, 0)[None],
            bias=bias_NN,
            heads=heads,
            sinks=None if sinks_Q is None else sinks_Q[:, None],
        )[0]
        return out_QND.transpose(0, 1).to(heads.q_NQD.dtype)
