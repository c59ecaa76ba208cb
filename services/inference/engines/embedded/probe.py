"""Whether new weights compute what the trainer computed with them, before they are served.

The probe of a publication has a few tokens and their log-probs. Weights that compute other ones
(bytes of another type, another model, a defect of an engine) or no numbers are not served.

Shape suffixes as in kv/attention.py; V vocabulary.
"""

from __future__ import annotations

import torch

from services.inference.engines.base import BrokenWeights, Probe, UnfitWeights
from services.inference.engines.embedded.kv.attention import (
    Heads,
    attention,
    attention_bias,
    exact_type,
)
from services.inference.engines.embedded.model import Policy, StagedWeights

PROBE_TOKENS = 16
"""Length of a probe of an engine's own."""
_TOLERANCE = 0.01
"""Median error of log-probs, in nats, above which weights are not those of the trainer."""
_ROUNDED_TOLERANCE = 0.5
"""Rounding to 16 bits gives about 0.05; bytes of another type give several nats."""


def adopt(policy: Policy, staged: StagedWeights, probe: Probe | None) -> None:
    """Serve `staged`, if it computes what `probe` has. Raises UnfitWeights for other log-probs,
    BrokenWeights for NaN or infinity; the weights served before then stay."""
    before = policy.swap(staged)
    try:
        _check(policy, probe, tolerance=_ROUNDED_TOLERANCE if staged.rounded else _TOLERANCE)
    except BaseException:
        policy.swap(before)
        raise


@torch.inference_mode()
def _check(policy: Policy, probe: Probe | None, *, tolerance: float) -> None:
    version = policy.version
    count = min(PROBE_TOKENS, policy.limits.context_tokens)
    ids = probe.ids if probe else tuple(n % policy.limits.vocabulary for n in range(count))
    if len(ids) > policy.limits.context_tokens or max(ids) >= policy.limits.vocabulary:
        raise UnfitWeights(
            f"weights {version}: their probe has {len(ids)} tokens up to {max(ids)}; this model "
            f"takes {policy.limits.context_tokens} up to {policy.limits.vocabulary - 1}"
        )
    logprobs_N = logprobs(policy, ids)
    if not logprobs_N.isfinite().all():
        raise BrokenWeights(f"weights {version} gave a log-prob that is not finite")
    if probe is None:
        return
    expected_N = torch.tensor(probe.logprobs, device=logprobs_N.device)
    # The median: a near tie in the routes of a mixture of experts may change single tokens.
    error = float((logprobs_N - expected_N).abs().median())
    if not error <= tolerance:
        raise UnfitWeights(
            f"weights {version}: log-probs of the probe differ from the trainer's by {error:.3g} "
            f"(median), more than {tolerance}"
        )


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
        return out_QND.transpose(0, 1)
