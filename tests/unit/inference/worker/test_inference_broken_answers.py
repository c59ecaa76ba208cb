"""Answers with a log-prob that is not finite, as a trainer learns of them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forge.core.errors import Unavailable
from forge.runtime.weights import BROKEN_KEY
from forge.v1 import inference_pb2 as pb
from forge.v1.common_pb2 import SamplingParams
from services.inference.engines.base import BrokenWeights
from services.inference.worker.broken_answers import note_broken
from services.inference.worker.service import PrefillServicer
from tests.support.inference.one_token import OneToken


async def test_broken_answers_are_counted_by_version() -> None:
    """In the metadata of the worker, from one on after a swap; an outage of etcd hides no error."""
    announced: list[str] = []

    async def announce() -> None:
        announced.append(context.metadata[BROKEN_KEY])
        raise Unavailable("etcd is away")

    async def broken(*_: object, **options: object) -> None:
        raise BrokenWeights("weights 3 gave a log-prob that is not finite")

    context: Any = SimpleNamespace(metadata={"weight_version": "3"}, announce=announce)
    engine: Any = OneToken(shares=True)
    engine.prefill = broken
    servicer = PrefillServicer(engine, on_broken=partial(note_broken, context))
    request = pb.PrefillRequest(
        request_id="r",
        hold_s=1.0,
        prompt_ids=b"\0\0\0\0",
        sampling=SamplingParams(max_tokens=1),
    )
    for version in ("3", "3", "4"):
        context.metadata["weight_version"] = version
        with pytest.raises(BrokenWeights):
            await servicer.Prefill(request, cast(Any, None))
    assert announced == ["3 1", "3 2", "4 1"]
