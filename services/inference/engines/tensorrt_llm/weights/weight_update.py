"""One weight update: buckets from the driver to all ranks, within one control action of each rank.

Owns the order of calls, not the files (`buckets`) nor what a rank does (`worker_extension`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, Protocol

from forge.core.errors import ForgeError, Unavailable
from forge.core.named_tensor import NamedTensor
from forge.runtime.telemetry import log
from services.inference.engine_settings import TensorRtLlmSettings
from services.inference.engines.tensorrt_llm.weights import buckets
from services.inference.engines.tensorrt_llm.weights.buckets import Bucket, Buckets
from services.inference.engines.tensorrt_llm.weights.checkpoint import Fitting
from services.inference.engines.threads import run_to_end

_ABORT_S = 30.0
"""Longest wait for ranks to leave the control action of a failed update."""


class Loadable(Protocol):
    """A version that fits the checkpoint."""

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each tensor."""

    @property
    def rounded(self) -> bool:
        """Whether a tensor was published in 16 bits."""

    def loaded(self) -> Iterator[NamedTensor]:
        """Yield the tensors with the checkpoint's names. May block for each: use it on a thread."""

    def fitting(self) -> Fitting:
        """After the load, return the version for a later reload."""

    def give_up(self) -> None:
        """End every wait for tensors with an error."""


class WeightUpdate:
    """One version on its way to the ranks. The first bucket is there from the beginning."""

    def __init__(
        self,
        folder: Buckets,
        first: Bucket,
        following: Iterator[Bucket],
        ranks: Ranks,
        *,
        give_up: Callable[[], None],
    ) -> None:
        """`following`: writes the buckets after `first` to `folder`; `give_up` ends its wait for
        tensors."""
        self._give_up = give_up
        self._folder = folder
        self._first = first
        self._following = following
        self._ranks = ranks

    async def check(self) -> None:
        """Have all ranks read the first bucket. Changes nothing. Raises `Unavailable`."""
        await self._ranks.call("check_forge_bucket", self._first)

    async def apply(self, *, drain: bool | None) -> None:
        """Load all buckets. Raises `Unavailable` if a rank fails: the weights are then a mix, and
        the engine must start again. `drain`: the control action's argument, None without one.
        No file is left."""
        try:
            await self._ranks.call("begin_forge_update", drain)
            async with aclosing(self._staged()) as staged:
                async for bucket in staged:
                    await self._ranks.call("load_forge_bucket", bucket)
            await self._ranks.call("finish_forge_update")
        except BaseException:
            await self._abort()
            raise
        finally:
            await run_to_end(self._folder.close)

    async def _staged(self) -> AsyncGenerator[Bucket]:
        """Yield the buckets. The next one is written while the caller has one."""
        current: Bucket | None = self._first
        while current is not None:
            writing = asyncio.create_task(asyncio.to_thread(next, self._following, None))
            try:
                yield current
                await self._ranks.in_time(writing, "the next tensors of a fetch")
            except BaseException:
                self._give_up()
                raise
            finally:
                # Also for a caller that leaves: the thread cannot be stopped.
                await asyncio.wait({writing})
                writing.exception()
            self._folder.remove(current)
            current = writing.result()

    async def _abort(self) -> None:
        """End the control actions: within one the library cannot shut down."""
        try:
            async with asyncio.timeout(_ABORT_S):
                await self._ranks.call("abort_forge_update")
        except (ForgeError, TimeoutError) as error:
            log.warning("tensorrt_llm_update_not_aborted", error=str(error))


class Ranks:
    """All GPU workers of an engine of the library."""

    def __init__(self, engine: Callable[[], Any], *, timeout_s: float) -> None:
        """`engine`: returns the library's engine."""
        self._engine = engine
        self._timeout_s = timeout_s

    async def in_time(self, running: asyncio.Task[Any], work: str) -> None:
        """Wait for a task that the ranks wait for. Raises `Unavailable`; the task runs on."""
        if not (await asyncio.wait({running}, timeout=self._timeout_s))[0]:
            raise self._late(work)

    def _late(self, work: str) -> Unavailable:
        limit = f"tensorrt_llm.update_timeout_s = {self._timeout_s:g}"
        return Unavailable(f"{work} took longer than {limit}")

    async def call(self, method: str, *arguments: Any) -> None:
        """Call a method of all ranks. Raises `Unavailable` if one fails."""
        try:
            async with asyncio.timeout(self._timeout_s):
                answers = await self._engine().collective_rpc(method, args=arguments)
        except TimeoutError:
            raise self._late(method) from None
        except ForgeError:
            raise
        except Exception as error:  # Any error of the library.
            raise Unavailable(f"{method}: {type(error).__name__}: {error}") from error
        failed = {rank: answer for rank, answer in enumerate(answers) if answer != ""}
        if failed:
            named = "; ".join(f"rank {rank}: {answer}" for rank, answer in failed.items())
            raise Unavailable(f"{method}: {named}")


@asynccontextmanager
async def staged_update(
    weights: Loadable, ranks: Ranks, settings: TensorRtLlmSettings
) -> AsyncIterator[WeightUpdate]:
    """Write the first bucket of an update; remove all files at the end. Raises
    `ResourceExhausted`."""
    size = settings.update_bucket_mib * buckets.MIB
    opening = buckets.opened(
        settings.update_dir,
        bucket_bytes=size,
        needed_bytes=buckets.needed_bytes(weights.sizes, bucket_bytes=size),
    )
    folder = await run_to_end(opening.__enter__)
    try:
        written = folder.write(weights.loaded())
        first = await run_to_end(partial(next, written), give_up=weights.give_up)
        yield WeightUpdate(folder, first, written, ranks, give_up=weights.give_up)
    finally:
        await run_to_end(partial(opening.__exit__, None, None, None))
