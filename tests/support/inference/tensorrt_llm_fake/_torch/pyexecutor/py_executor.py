"""The executor as a worker extension sees it on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from tests.support.inference.tensorrt_llm_fake._torch.pyexecutor.hang_detector import HangDetector
from tests.support.inference.tensorrt_llm_fake._torch.pyexecutor.model_loader import ModelLoader
from tests.support.inference.tensorrt_llm_fake.behaviour import behaviour, misuse
from tests.support.inference.tensorrt_llm_fake.core import Core


class MoeLoadBalancer:
    """Places the experts of a model: a part of the weights that no hook of a module renews."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def register_weight_slots_after_to_cuda(self) -> None:
        """Take the weights of the experts."""
        self.calls.append("register")

    def finalize_model(self) -> None:
        """Place them."""
        self.calls.append("finalize")


class PyExecutor:
    """See the library."""

    def __init__(self, core: Core, rank: int) -> None:
        self._core = core
        self._rank = rank
        model = core.ranks[rank]
        self.hang_detector = HangDetector()
        self.model_engine = SimpleNamespace(
            model=model,
            model_loader=ModelLoader(model, rank, self.hang_detector),
            moe_load_balancer=MoeLoadBalancer(),
        )

    @contextmanager
    def control_action(self, drain: bool | None = None) -> Iterator[None]:
        """Run between two steps."""
        if behaviour().is_old and drain is not None:
            raise TypeError("control_action() got an unexpected keyword argument 'drain'")
        with self._core.control(self._rank, drain=drain is not False):
            yield
            model = self._core.ranks[self._rank]
            if model.calls:
                self._end_update()

    def reset_prefix_cache(self) -> None:
        """Forget all blocks."""
        self._core.blocks.clear()

    def _end_update(self) -> None:
        model = self._core.ranks[self._rank]
        # Of one part after the other, as at the first load.
        ends = ("process_weights_after_loading", "post_load_weights")
        wanted = [
            *(f"{part}.pre_reload_weights" for part in ("layer", "head")),
            *(f"{part}.{end}" for part in ("layer", "head") for end in ends),
        ]
        if model.calls != wanted and model.generation >= 0:
            raise misuse(f"hooks of an update: {model.calls}")
        balancer = self.model_engine.moe_load_balancer
        if balancer.calls != ["register", "finalize"] and model.generation >= 0:
            raise misuse(f"the experts are not placed after an update: {balancer.calls}")
        balancer.calls.clear()
        model.calls.clear()
        if model.generation >= 0:
            model.end_update()
            model.generation += 1
