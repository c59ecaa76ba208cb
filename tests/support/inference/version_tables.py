"""Weights whose tokens show the version that sampled them, published to real workers.

The next token of a `last_token_model` depends on the last one alone: whatever moved, swapped or was
cached, the log-prob of each token is in the table of its version.
"""

from __future__ import annotations

import pytest
import torch

from tests.contract.engines import last_token_model, logprob_table, published
from tests.support.inference.cluster import InferenceCluster, Sample

ERROR = 1e-4
"""Of a log-prob in float32: the bar of every engine."""


class VersionTables:
    """Publishes versions and checks samples against them."""

    def __init__(self, inference: InferenceCluster) -> None:
        self._inference = inference
        self._tables: dict[int, torch.Tensor] = {}

    async def publish(self, *workers: str) -> int:
        """Publishes the next version; returns once these workers serve it."""
        model = last_token_model(seed=len(self._tables) + 1)
        version = await self._inference.publisher.publish(published(model))
        self._tables[version] = logprob_table(model)
        for name in workers:
            await self._inference.registered("decode", name, weight_version=str(version))
        return version

    def check(self, ids: list[int], sample: Sample, *, top_k: int = 0) -> None:
        """The versions do not fall, and each token has the log-prob that its version gives it; with
        `top_k`, it is among the likeliest of its version."""
        assert sample.versions == sorted(sample.versions)
        before = [ids[-1], *sample.ids[:-1]]
        for last, token, version, logprob in zip(
            before, sample.ids, sample.versions, sample.logprobs, strict=True
        ):
            expected_V = self._tables[version][last]
            if top_k:
                assert token in expected_V.topk(top_k).indices
            else:
                assert logprob == pytest.approx(float(expected_V[token]), abs=ERROR)
