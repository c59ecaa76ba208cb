"""The asynchronous engine."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Generator
from threading import Lock
from typing import Any, Self

from tests.support.inference.tensorrt_llm_fake._torch.pyexecutor.py_executor import PyExecutor
from tests.support.inference.tensorrt_llm_fake.behaviour import behaviour
from tests.support.inference.tensorrt_llm_fake.core import Core
from tests.support.inference.tensorrt_llm_fake.executor.result import GenerationResult
from tests.support.inference.tensorrt_llm_fake.llmapi.llm import LLM


class RayGPUWorker:
    """See the library: one rank."""

    def __init__(self, engine: PyExecutor, rank: int) -> None:
        self.engine = engine
        self.device_id = rank
        self.thread = Lock()
        """Calls run one after the other, as on the one thread of a Ray actor."""

    def setup_engine(self) -> None:
        """Is done."""

    def _handle_background_error(self) -> None:
        """There is none."""


def with_extension(extension: type) -> Any:
    """Return the worker's class with an extension. Raises ValueError for a name that both have."""
    for name in dir(extension):
        if not name.startswith("__") and hasattr(RayGPUWorker, name):
            raise ValueError(f"Worker class RayGPUWorker already defines {name!r}")
    return type(f"RayGPUWorkerWith{extension.__name__}", (RayGPUWorker, extension), {})


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
        worker_class = with_extension(getattr(importlib.import_module(module), name))
        for rank in range(len(self.core.ranks)):
            self.workers.append(worker_class(PyExecutor(self.core, rank), rank))
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
        target_ranks: int | list[int] | None = None,
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
        # A method of the library's own extension: another one must have it, too.
        await self.collective_rpc("wait_for_engine_idle")

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
        worker = self.workers[rank]
        if not callable(getattr(worker, method, None)):
            raise AttributeError(f"The RayGPUWorker has no method called {method!r}.")

        def run() -> Any:
            with worker.thread:
                return getattr(worker, method)(*args, **kwargs)

        return await asyncio.to_thread(run)
