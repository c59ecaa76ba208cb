"""Where the trainer computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge.core.errors import ConfigError
from forge.rl.device import device_of
from tests.support.trainer.learners import started_learner


@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
def test_missing_device_is_one_line(device: str, model_path: Path, tmp_path: Path) -> None:
    """With the setting; another device is not used."""
    with pytest.raises(ConfigError, match=rf"device = '{device}' is not available on rank 0: "):
        started_learner(model_path, tmp_path, device=device)


def test_each_rank_has_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cuda` is the device of the rank's number; a numbered device is that one."""
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    assert device_of("cuda", rank=3) == torch.device("cuda:3")
    assert device_of("cuda:1", rank=3) == torch.device("cuda:1")
    assert device_of("cpu", rank=3) == torch.device("cpu")
