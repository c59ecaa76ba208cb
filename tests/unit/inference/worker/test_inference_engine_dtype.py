"""The meaning of the worker's setting `dtype`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from services.inference.worker.engine_dtype import computed_type, engine_dtype
from services.trainer.config import TrainerConfig
from services.trainer.model.placement import computed_type as trainer_type


@pytest.fixture(params=[True, False], ids=["with bfloat16", "without"])
def has_bfloat16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterable[bool]:
    """A CPU with or without instructions for bfloat16."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": request.param})
    yield request.param


def test_device_is_the_type_of_a_trainer_with_autocast_auto(has_bfloat16: bool) -> None:
    """One rule for both; the engine gets the name of the type."""
    expected = "bfloat16" if has_bfloat16 else "float32"
    assert engine_dtype("device", device="cpu") == expected
    assert trainer_type(TrainerConfig(model_path="m", autocast="auto")) == expected
    assert trainer_type(TrainerConfig(model_path="m")) == "float32"


def test_auto_is_the_files_type_but_float32_on_a_device_without_bfloat16(
    has_bfloat16: bool, tmp_path: Path
) -> None:
    """Announced by the name of the type; the engine reads the file itself."""
    assert engine_dtype("auto", device="cpu") == "auto"
    for stored, expected in {
        "bfloat16": "bfloat16" if has_bfloat16 else "float32",
        "float16": "float16",
        "": "float32",
    }.items():
        (tmp_path / "config.json").write_text(json.dumps({"dtype": stored} if stored else {}))
        found = computed_type("auto", device="cpu", model_path=str(tmp_path))
        assert found == expected, stored
