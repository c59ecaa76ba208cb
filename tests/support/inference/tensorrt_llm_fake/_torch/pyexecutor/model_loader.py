"""Loads weights into the model of one rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tests.support.inference.tensorrt_llm_fake._torch.pyexecutor.hang_detector import HangDetector
from tests.support.inference.tensorrt_llm_fake.behaviour import behaviour, misuse
from tests.support.inference.tensorrt_llm_fake.model import RankModel


class ModelLoader:
    """See the library."""

    def __init__(self, model: RankModel, rank: int, hang_detector: HangDetector) -> None:
        self._model = model
        self._rank = rank
        self._hang_detector = hang_detector
        self._began = False

    def __getattribute__(self, name: str) -> object:
        """1.2.1 has no hooks."""
        if behaviour().is_old and name.endswith("_update_weights"):
            raise AttributeError(name)
        return super().__getattribute__(name)

    def begin_update_weights(self) -> None:
        """Begin an update."""
        if self._began:
            raise misuse("an update begins within another")
        self._began = True

    def finalize_update_weights(self) -> None:
        """End an update."""
        if not self._began:
            raise misuse("an update ends that has not begun")
        self._began = False

    def abort_update_weights(self) -> None:
        """Give an update up; the weights are whatever was loaded."""
        self._began = False
        self._model.generation = -1

    def reload(
        self,
        model: RankModel,
        weights: Mapping[str, torch.Tensor],
        allow_partial_loading: bool = False,
    ) -> None:
        """Load some tensors."""
        if not allow_partial_loading:
            raise misuse("a bucket is loaded as if it were the whole model")
        if "head.pre_reload_weights" not in model.calls:
            raise misuse("weights are reloaded without pre_reload_weights")
        if not behaviour().is_old and not self._began:
            raise misuse("weights are reloaded without begin_update_weights")
        if behaviour().failing_reload == self._rank:
            behaviour().failing_reload = None
            model.generation = -1
            raise RuntimeError("CUDA out of memory")
        self._hang_detector.note_bucket()
        model.load(weights)
