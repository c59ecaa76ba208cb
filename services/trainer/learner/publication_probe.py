"""The probe of a publication: the log-probs that its weights compute for a few tokens.

Engines compare their own log-probs with it before they serve the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import torch

from forge.core.prefix_tree import Sample
from forge.rl.model.policy import TreePolicy
from forge.rl.model.probe import as_sample, own_logprobs
from forge.rl.numerics import is_narrow, without_tf32
from forge.rl.out_of_memory import memory_shortage
from forge.runtime.telemetry import log
from forge.runtime.weights import WeightProbe
from services.trainer.model.full_weights import Trainee
from services.trainer.model.lora import base_name

PROBE_TOKENS = 16
EXACT_EVERY = 16
"""Interval of probes with published values, in publications; the first of a process has one. Such a
probe takes longer than the rest of a publication, and one finds the same faults as all."""


@torch.no_grad()
def make_probe(
    policy: TreePolicy, trainee: Trainee | None, *, published: torch.dtype
) -> WeightProbe:
    """Compute the log-probs of a few tokens with the present weights, by the model's own forward in
    float32. If `published` has 16 bits, compute them with the published values of `trainee`, too;
    None: without them."""
    config = policy.model.config.get_text_config(decoder=True)
    count = min(PROBE_TOKENS, getattr(config, "max_position_embeddings", None) or PROBE_TOKENS)
    ids = Random(PROBE_TOKENS).choices(range(min(policy.vocabulary, config.vocab_size)), k=count)
    sample = as_sample(ids)
    with policy.attention.stock(), without_tf32():
        logprobs = _logprobs(policy, sample)
        rounded = [] if trainee is None else _published(policy, sample, trainee, published)
    return WeightProbe(ids=ids, logprobs=logprobs, published=rounded)


def _logprobs(policy: TreePolicy, sample: Sample) -> list[float]:
    found: list[float] = policy.run(lambda: own_logprobs(policy.model, sample)).tolist()
    return found


@contextmanager
def _published_values(trainee: Trainee, published: torch.dtype) -> Iterator[None]:
    """Context in which the model computes with the published values, adapters merged into them."""
    state = trainee.model.state_dict(keep_vars=True)
    named = {base_name(name): one for name, one in state.items()}
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for name, value in trainee.published():
            one = named[name]
            if one.is_floating_point():
                rounded = value.to(published).to(one.dtype)
                kept.append((one, one.data))
                one.data = rounded
        with trainee.without_adapters():
            yield
    finally:
        for one, data in kept:
            one.data = data


def _published(
    policy: TreePolicy, sample: Sample, trainee: Trainee, published: torch.dtype
) -> list[float]:
    """Log-probs with the published values. Empty if the present values are the published ones, or
    if there is no memory for both."""
    wide = all(one.dtype == torch.float32 for one in policy.model.parameters())
    if not is_narrow(published) or not wide:
        return []
    try:
        with _published_values(trainee, published):
            return _logprobs(policy, sample)
    except (RuntimeError, MemoryError) as error:
        shortage = memory_shortage(error)
        if not shortage:
            raise
    log.warning("published_probe_without_memory", reason=shortage)
    return []
