"""Loads a version during its fetch: passes checked tensors to the thread that writes buckets.

Owns the start of the load: the rest must be expected within the time of a load. So requests do not
wait for the network, and few fetches can fail after a rank has changed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from threading import Condition

from forge.core.errors import Unavailable
from forge.core.named_tensor import NamedTensor
from forge.runtime.concurrency.tasks import cancel_and_wait
from services.inference.engines.arriving import Arriving
from services.inference.engines.tensorrt_llm.weights.checkpoint import (
    Checkpoint,
    Fitting,
    FittingForms,
    is_rounded,
)


class ArrivingWeights:
    """A `Loadable` whose tensors arrive."""

    def __init__(self, fitting: FittingForms) -> None:
        self._fitting = fitting
        self._forms = fitting.loaded
        self._taken: dict[str, NamedTensor] = {}
        self._error: BaseException | None = None
        self._changed = Condition()

    @property
    def sizes(self) -> Sequence[int]:
        """See `Loadable`."""
        return [form.size_bytes for form in self._forms.values()]

    @property
    def rounded(self) -> bool:
        """See `Loadable`."""
        return is_rounded(form.dtype for form in self._forms.values())

    def loaded(self) -> Iterator[NamedTensor]:
        """See `Loadable`. Raises the error that has ended the fetch or the checks."""
        found, scales = self._arriving(), self._fitting.scales
        return found if scales is None else scales.converted(found, self._forms.keys())

    def _arriving(self) -> Iterator[NamedTensor]:
        for name in self._forms:
            with self._changed:
                while name not in self._taken:
                    if self._error is not None:
                        raise self._error
                    self._changed.wait()
            yield self._taken[name]

    def give_up(self) -> None:
        """See `Loadable`."""
        self.end(Unavailable("the load of the weights was given up"))

    def take(self, parts: Iterable[NamedTensor]) -> None:
        """Add checked tensors, as `FittingForms.parts` returns them."""
        with self._changed:
            self._taken |= {one.name: one for one in parts}
            self._changed.notify_all()

    def end(self, error: BaseException) -> None:
        """Raise `error` in the thread that waits for a tensor; the first error stays."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def fitting(self) -> Fitting:
        """See `Loadable`."""
        return Fitting(tensors=self._taken, scales=self._fitting.scales)


@asynccontextmanager
async def taken(
    arriving: Arriving,
    fitting: FittingForms,
    checkpoint: Checkpoint,
    *,
    version: int,
    load_s: float,
    least_bytes: int,
) -> AsyncIterator[ArrivingWeights]:
    """Check the tensors as they arrive; yield once the load may begin. `load_s`: time of a load;
    `least_bytes`: bytes that must have arrived before.

    Raises `UnfitWeights`, `BrokenWeights`, and the error of a fetch that fails before the load.
    """
    weights = ArrivingWeights(fitting)
    ready = asyncio.Event()
    start = _Start(weights.sizes, load_s=load_s, least_bytes=least_bytes)

    async def take() -> None:
        try:
            async for tensor in arriving.tensors():
                parts = fitting.parts(tensor)
                if not parts:
                    continue
                await asyncio.to_thread(checkpoint.check, tensor, version=version)
                weights.take(parts)
                if start.passed(memoryview(tensor.data).nbytes, now_s=time.monotonic()):
                    ready.set()
        except BaseException as error:
            weights.end(error if isinstance(error, Exception) else Unavailable("cancelled"))
            raise
        finally:
            ready.set()

    taking = asyncio.create_task(take())
    try:
        await ready.wait()
        if taking.done():
            taking.result()
        yield weights
    finally:
        weights.give_up()
        await cancel_and_wait(taking)


class _Start:
    """Decides when the load may begin."""

    def __init__(self, sizes: Sequence[int], *, load_s: float, least_bytes: int) -> None:
        self._total_bytes = sum(sizes)
        self._load_s = load_s
        self._least_bytes = least_bytes
        self._taken_bytes = 0
        self._began_s: float | None = None
        self._first_bytes = 0

    def passed(self, size_bytes: int, *, now_s: float) -> bool:
        """Count a tensor. Return True if half of the bytes are here, and the rest should arrive
        within the time of a load, at the rate since the first tensor."""
        self._taken_bytes += size_bytes
        if self._began_s is None:
            self._began_s, self._first_bytes = now_s, self._taken_bytes
            return False
        missing = self._total_bytes - self._taken_bytes
        if self._taken_bytes < max(missing, self._least_bytes):
            return False
        rate_s = (now_s - self._began_s) / max(1, self._taken_bytes - self._first_bytes)
        return missing * rate_s <= self._load_s
