"""The stand-in of TensorRT-LLM, and the model that it serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.engines import reference
from tests.support.inference.tensorrt_llm_fake.behaviour import Behaviour, behaving


@pytest.fixture
def behaviour() -> Iterator[Behaviour]:
    """The stand-in's behaviour; a misuse or a leak fails the test."""
    with behaving(Behaviour()) as played:
        yield played


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """The Qwen3-type model of the contract."""
    reference("qwen3").save_pretrained(tmp_path)
    return tmp_path
