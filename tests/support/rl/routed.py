"""Samples with recorded experts, and routers written out by hand that use them.

The routers here are the definition of correct: the model's formula, with the experts of a table in
place of its choice.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from forge.core.prefix_tree import Sample
from forge.core.routes import Routes, RouteShape, RouteSpan

UNKNOWN = -1


def with_routes(
    samples: Sequence[Sample], shape: RouteShape, *, seed: int = 0, apart: Sequence[int] = ()
) -> list[Sample]:
    """Samples with random experts, equal for equal prefixes but for the samples `apart`, whose
    fourth token has others. The second token of each has none."""
    routed = []
    for index, one in enumerate(samples):
        rows = []
        for place in range(one.tokens):
            key = (seed, crc32(one.ids[: 4 * (place + 1)]))
            rng = np.random.default_rng((*key, index + 1) if index in apart and place == 3 else key)
            rows.append([_distinct(rng, shape) for _ in range(shape.layers)])
        ids_LMK = np.asarray(rows, np.uint8)
        column = Routes(ids=ids_LMK.tobytes(), layers=shape.layers, top_k=shape.top_k, id_bytes=1)
        spans = [RouteSpan(start=0, tokens=1, routes=column)]
        if one.tokens > 2:
            rest = one.tokens - 2
            spans.append(RouteSpan(start=2, tokens=rest, routes=column, first_row=2))
        routed.append(replace(one, routes=tuple(spans)))
    return routed


def _distinct(rng: np.random.Generator, shape: RouteShape) -> list[int]:
    found: list[int] = rng.permutation(shape.experts)[: shape.top_k].tolist()
    return found


def table(sample: Sample) -> Tensor:
    """[L, M, K] the experts of a sample's tokens; UNKNOWN for those without."""
    routes = sample.routes[0].routes
    shape = (sample.tokens, routes.layers, routes.top_k)
    found = np.full(shape, UNKNOWN)
    for span in sample.routes:
        rows = np.frombuffer(span.routes.ids, np.uint8).reshape(-1, *shape[1:])
        found[span.start : span.end] = rows[span.first_row : span.first_row + span.tokens]
    return torch.from_numpy(found)


@contextmanager
def routers_by_hand(model: Any, samples: Sequence[Sample]) -> Iterator[None]:
    """Context in which the model computes each of the samples with its experts."""
    tables = {tuple(array("i", one.ids)): table(one) for one in samples}
    current: list[Tensor] = []

    def look_up(_: nn.Module, args: Any, named: Any) -> None:
        current[:] = [tables[tuple(named["input_ids"][0].tolist())]]

    hook = model.register_forward_pre_hook(look_up, with_kwargs=True)
    routers = [one for one in model.modules() if type(one).__name__.lower().endswith("topkrouter")]
    for layer, router in enumerate(routers):
        router.forward = _router(router, layer, current)
    try:
        yield
    finally:
        hook.remove()
        for router in routers:
            del router.forward


def _router(router: Any, layer: int, current: list[Tensor]) -> Callable[[Tensor], Any]:
    def choose(scores_LX: Tensor) -> Tensor:
        given_LK = current[0][:, layer].to(scores_LX.device)
        own_LK = scores_LX.topk(router.top_k, sorted=False).indices
        return torch.where(given_LK == UNKNOWN, own_LK, given_LK)

    def forward(hidden: Tensor) -> Any:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        logits_LX = nn.functional.linear(hidden, router.weight, getattr(router, "bias", None))
        kind = type(router).__name__
        if kind.startswith("GptOss"):
            experts_LK = choose(logits_LX)
            return logits_LX, logits_LX.gather(1, experts_LK).softmax(-1), experts_LK
        if kind.startswith("DeepseekV3"):
            scores_LX = logits_LX.sigmoid()
            experts_LK = choose(scores_LX + router.e_score_correction_bias)
        else:
            scores_LX = logits_LX.softmax(-1)
            experts_LK = choose(scores_LX)
        weights_LK = scores_LX.gather(1, experts_LK)
        if getattr(router, "norm_topk_prob", True):
            weights_LK = weights_LK / weights_LK.sum(-1, keepdim=True)
        return logits_LX, weights_LK * getattr(router, "routed_scaling_factor", 1.0), experts_LK

    return forward
