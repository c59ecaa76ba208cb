"""The asynchronous engine."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Generator
from typing import Any, Self

from tests.support.inference.tensorrt_llm_fake._torch.pyexecutor.py_executor import PyExecutor
from tests.support.inference.tensorrt_llm_fake.behaviour import behaviour
from tests.support.inference.tensorrt_llm_fake.core import Core
from tests.support.inference.tensorrt_llm_fake.executor.result import GenerationResult
from tests.support.inference.tensorrt_llm_fake.llmapi.llm import LLM

started: list[AsyncLLM] = []
"""All engines of this process, for tests to look into."""


class AsyncLLM(LLM):
    """See the library."""

    def __init__(
        self,
        placement_groups: list[Any] | None = None,
        placement_bundle_indices: list[list[int]] | None = None,
        per_worker_gpu_share: float | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        kwargs["orchestrator_type"] = "ray"
        super().__init__(*args, **kwargs)
        self._paused = False
        self.workers: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        """1.2.1 has no pause."""
        if behaviour().is_old and name in ("pause_generation", "resume_generation"):
            raise AttributeError(name)
        return super().__getattribute__(name)

    def __await__(self) -> Generator[Any, None, Self]:
        return self._setup().__await__()

    async def _setup(self) -> Self:
        self.core = await asyncio.to_thread(Core, self.args)
        module, _, name = str(self.args.ray_worker_extension_cls).rpartition(".")
        extension = getattr(importlib.import_module(module), name)
        for rank in range(len(self.core.ranks)):
            worker = extension()
            worker.engine = PyExecutor(self.core, rank)
            worker.device_id = rank
            self.workers.append(worker)
        started.append(self)
        return self

    def generate_async(self, *args: Any, **kwargs: Any) -> GenerationResult:
        """Start a request."""
        if self._paused:
            raise RuntimeError("AsyncLLM is paused. Call resume_generation() before submitting.")
        return super().generate_async(*args, **kwargs)

    async def collective_rpc(
        self,
        method: str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
    ) -> list[Any]:
        """Call a method of all ranks at once."""
        calls = (self._call(rank, method, args, kwargs or {}) for rank in range(len(self.workers)))
        return list(await asyncio.gather(*calls))

    async def pause_generation(self) -> None:
        """Abort all requests, and refuse new ones."""
        assert self.core is not None
        self._paused = True
        for request in list(self.core.requests):
            self.core.abort(request)
        if self.core.held:
            behaviour().leaks += self.core.held
        await asyncio.to_thread(self.core.wait_idle)

    async def resume_generation(self) -> None:
        """Accept requests."""
        self._paused = False

    async def _call(
        self, rank: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        played = behaviour()
        if played.raising.get(method) == rank:
            del played.raising[method]
            raise RuntimeError(f"rank {rank}: CUDA error")
        return await asyncio.to_thread(getattr(self.workers[rank], method), *args, **kwargs)
