"""TensorRT-LLM under contract, on its stand-in: a misuse of the library fails the test.

The library loads a checkpoint before it takes a version, so a model without one gets random weights
that no test expects. Versions arrive in many buckets.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.inference.engines.capabilities import Capabilities
from services.inference.engines.tensorrt_llm.arguments import Role
from services.inference.engines.tensorrt_llm.requests import capabilities_of
from services.inference.engines.tensorrt_llm.weights import buckets
from tests.contract.engines import Pair
from tests.support.inference.tensorrt_llm import library, started
from tests.support.inference.tensorrt_llm_fake.behaviour import Behaviour, behaving

_BUCKET_BYTES = 1 << 16


def capabilities(*, transfers: bool) -> Capabilities:
    """Of the stand-in, which has the newest surface."""
    return capabilities_of(library().features, transfers=transfers)


@asynccontextmanager
async def apart(model_path: Path, **options: Any) -> AsyncIterator[Pair]:
    """A prefill and a decode engine, without weights."""
    with _strict(model_path):
        async with (
            started(model_path, Role.PREFILL, **options) as prefill,
            started(model_path, Role.DECODE, **options) as decode,
        ):
            yield Pair(prefill=prefill, decode=decode)


@asynccontextmanager
async def both(model_path: Path, **options: Any) -> AsyncIterator[Pair]:
    """An engine in the role both, without weights."""
    with _strict(model_path):
        async with started(model_path, Role.BOTH, **options) as engine:
            yield Pair(prefill=engine, decode=engine)


@contextmanager
def _strict(model_path: Path) -> Iterator[None]:
    if not [*model_path.glob("*.safetensors")]:
        torch.manual_seed(99)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))
        model.save_pretrained(model_path)
    with behaving(Behaviour()), patch.object(buckets, "MIB", _BUCKET_BYTES):
        yield
