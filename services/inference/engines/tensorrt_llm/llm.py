"""The library's engine with what surrounds it: start, legs, weight updates, restart.

A leg is one call of the library. Every leg has one weight version: an update waits until no leg
runs, or ends the legs and lets their requests continue in new ones. So a token's version is that of
its leg.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from forge.core.errors import ForgeError, Unavailable, UnsupportedByEngines
from forge.core.named_tensor import NamedTensor
from forge.runtime.telemetry import log
from services.inference.engine_settings import TensorRtLlmSettings
from services.inference.engines.arriving import Arriving
from services.inference.engines.base import ModelLimits, Probe
from services.inference.engines.tensorrt_llm.library.library import Library
from services.inference.engines.tensorrt_llm.library.surface import Feature
from services.inference.engines.tensorrt_llm.metrics import RESTARTS
from services.inference.engines.tensorrt_llm.requests import NO_END
from services.inference.engines.tensorrt_llm.weights import buckets
from services.inference.engines.tensorrt_llm.weights.arriving_weights import taken
from services.inference.engines.tensorrt_llm.weights.checkpoint import Checkpoint, Fitting
from services.inference.engines.tensorrt_llm.weights.probe import check_probe
from services.inference.engines.tensorrt_llm.weights.weight_update import (
    Loadable,
    Ranks,
    WeightUpdate,
    staged_update,
)
from services.inference.engines.threads import run_detached

_FAILURES_OF_A_DEAD_ENGINE = 3
"""Failed requests in a row before the engine must prove that it lives."""
_PROOF_S = 120.0
_ABORT_S = 10.0
"""Longest wait for the library's end of an aborted request."""
_STARTS = 3
"""Longest time of a restart, in times of the first start."""
_THREAD = "tensorrt_llm"


class EngineDied(Exception):
    """The library's engine cannot be used any more: the worker must end."""


class Gate:
    """Open but during an update; one update at a time."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._updates = asyncio.Lock()

    async def passed(self) -> None:
        """Wait until it is open; it stays so until the next await of the caller."""
        while not self._open.is_set():
            await self._open.wait()

    @asynccontextmanager
    async def closed(self) -> AsyncGenerator[None, None]:
        """Keep it closed within."""
        async with self._updates:
            self._open.clear()
            try:
                yield
            finally:
                self._open.set()


class Leg:
    """One call of the library."""

    def __init__(self, *, version: int, is_context: bool, transferring: bool) -> None:
        self.version = version
        self.result: Any = None
        """The library's, awaitable and iterable; None before it has begun."""
        self.is_context = is_context
        """Whether it computes a prompt for a decode engine."""
        self.transferring = transferring
        """Whether keys and values still arrive: an abort would leak them."""
        self.arrived = asyncio.Event()
        """Set with the first token."""
        self.ended = asyncio.Event()
        self._abort_later = False

    def note_token(self) -> None:
        """A sampled token proves that the transfer has ended."""
        self.transferring = False
        self.arrived.set()
        if self._abort_later:
            self.abort()

    def abort(self) -> None:
        """Stop it now, or at its first token if keys and values still arrive."""
        if self.result is None or self.ended.is_set() or self.is_context:
            return
        if self.transferring:
            self._abort_later = True
        else:
            self.result.abort()

    async def end(self) -> None:
        """Stop it, and wait until the library has ended it. Its answer is dropped."""
        if self.result is None or self.is_context:
            return
        self.abort()
        try:
            async with asyncio.timeout(_ABORT_S):
                async for _ in self.result:
                    if self.transferring:
                        self.note_token()
        except Exception as error:  # The library's own, or it takes too long.
            log.warning("tensorrt_llm_request_not_ended", error=f"{type(error).__name__}: {error}")


class Llm:
    """One engine of the library, in one process, over all its GPUs."""

    def __init__(
        self,
        library: Library,
        arguments: Mapping[str, Any],
        settings: TensorRtLlmSettings,
        *,
        checkpoint: Checkpoint,
        limits: ModelLimits,
        holds_prompts: bool,
    ) -> None:
        """`checkpoint`: what the library loads at its start. `holds_prompts`: whether decode
        engines fetch from this one; a pause would abort that."""
        self.version = 0
        """Version of the weights in service; 0 before the first."""
        self.gate = Gate()
        self.legs: set[Leg] = set()
        self.died: asyncio.Future[EngineDied] = asyncio.get_running_loop().create_future()
        self.library = library
        self._pauses = Feature.PAUSE in library.features and not holds_prompts
        self._arguments = dict(arguments)
        self._settings = settings
        self._llm: Any = None
        self._checkpoint = checkpoint
        self._limits = limits
        self._ranks = Ranks(lambda: self.engine, timeout_s=settings.update_timeout_s)
        self._snapshot: Fitting | None = None
        """The last whole version, to start again with."""
        self._start_s = 0.0
        """Time of the first start."""
        self._load_s = 0.0
        """Time that the ranks took to load the last version; 0 before the first."""
        self._failures = 0
        self._proof: asyncio.Task[None] | None = None

    @property
    def engine(self) -> Any:
        """The library's own engine. Raises `Unavailable` while there is none."""
        if self._llm is None:
            raise Unavailable("engine 'tensorrt_llm' starts again")
        return self._llm

    async def start(self) -> None:
        """Start the library's engine, without weights of ours."""
        began_s = time.monotonic()
        # The constructor imports, checks and may start Ray: seconds to minutes.
        create = partial(self.library.async_llm, **self._arguments)
        self._llm = await (await run_detached(create, name=_THREAD))
        took_s = time.monotonic() - began_s
        self._start_s = self._start_s or took_s
        log.info("tensorrt_llm_started", start_s=round(took_s, 3))

    async def close(self) -> None:
        """End the library's engine; all legs fail."""
        if self._proof is not None:
            self._proof.cancel()
        llm, self._llm = self._llm, None
        if llm is not None:
            await run_detached(llm.shutdown, name=_THREAD)

    @asynccontextmanager
    async def leg(
        self, ids: Sequence[int], params: Any, *, hand_off: Any = None
    ) -> AsyncGenerator[Leg, None]:
        """Start a call; the gate must be open. A caller that leaves by an error ends it.

        Raises `UnsupportedByEngines` for parameters that the library refuses.
        """
        is_context = hand_off is not None and hand_off.request_type == "context_only"
        arguments: dict[str, Any] = {"inputs": list(ids), "sampling_params": params}
        arguments["streaming"] = not is_context
        if hand_off is not None:
            arguments["disaggregated_params"] = hand_off
        if Feature.CACHE_SALT in self.library.features:
            arguments["cache_salt"] = f"weights-{self.version}"
        leg = Leg(
            version=self.version,
            is_context=is_context,
            transferring=hand_off is not None and not is_context,
        )
        try:
            leg.result = self._generate(arguments, received=leg.transferring)
            self.legs.add(leg)
            yield leg
            self._failures = 0
        except ForgeError:
            await leg.end()
            raise
        except Exception as error:
            # A prefill engine that has ended fails many transfers in a row.
            if not leg.transferring:
                self._note_failure(error)
            raise Unavailable(f"engine 'tensorrt_llm': {type(error).__name__}: {error}") from error
        except BaseException:
            leg.abort()
            raise
        finally:
            leg.ended.set()
            leg.arrived.set()
            self.legs.discard(leg)

    def _generate(self, arguments: Mapping[str, Any], *, received: bool) -> Any:
        """`received`: with keys and values of another engine."""
        try:
            return self.engine.generate_async(**arguments)
        except ValueError as error:
            if received:
                # Perhaps for the hand-off: the prompt is read again without it.
                raise Unavailable(f"engine 'tensorrt_llm' refuses a hand-off: {error}") from error
            raise UnsupportedByEngines(
                f"engine 'tensorrt_llm' refuses the request: {error}"
            ) from error

    async def update(
        self, tensors: Mapping[str, NamedTensor], *, version: int, probe: Probe | None
    ) -> None:
        """Serve these weights. All or nothing: on any failure of a rank the engine starts again
        with the version before.

        Raises `UnfitWeights` and `BrokenWeights`; `Unavailable` if the engine has started again.
        """
        weights = await asyncio.to_thread(self._checkpoint.fit, tensors, version=version)
        await self._update(weights, version, probe)

    async def update_arriving(
        self, arriving: Arriving, *, version: int, probe: Probe | None
    ) -> None:
        """Serve weights that are still fetched: buckets reach the ranks while the last tensors
        arrive. All or nothing as `update`; a fetch that fails before the load changes nothing."""
        fit_forms = self._checkpoint.fit_forms
        fitting = await asyncio.to_thread(fit_forms, arriving.forms, version=version)
        if fitting is None:
            await self.update(await arriving.whole(), version=version, probe=probe)
            return
        async with taken(
            arriving,
            fitting,
            self._checkpoint,
            version=version,
            load_s=self._load_s,
            least_bytes=self._settings.update_bucket_mib * buckets.MIB,
        ) as weights:
            arriving.keep()
            await self._update(weights, version, probe)

    async def _update(self, weights: Loadable, version: int, probe: Probe | None) -> None:
        async with staged_update(weights, self._ranks, self._settings) as update:
            # Before any rank changes: a directory that a rank does not see costs no restart.
            await update.check()
            async with self.gate.closed():
                await self._be_alone()
                await self._apply(update, weights, version, probe)
                self._snapshot = weights.fitting()

    async def _apply(
        self, update: WeightUpdate, weights: Loadable, version: int, probe: Probe | None
    ) -> None:
        try:
            began_s = time.monotonic()
            await update.apply(drain=self._drain())
            self._load_s = time.monotonic() - began_s
            rounded = weights.rounded or self._rounds
            tolerance = self._checkpoint.probe_tolerance if rounded else None
            await check_probe(
                self.engine,
                self.library,
                probe,
                version=version,
                limits=self._limits,
                rounded_tolerance=tolerance,
            )
            self.version = version
        except BaseException as error:
            log.error("tensorrt_llm_update_failed", version=version, error=str(error))
            await self._restart()
            raise

    @property
    def _rounds(self) -> bool:
        """Whether the library computes, or stores keys and values, in 16 bits or fewer."""
        dtype = self._arguments.get("dtype")
        served = self._checkpoint.rounded if dtype is None else dtype != "float32"
        return served or self._settings.kv_dtype != "auto"

    def _drain(self) -> bool | None:
        """The control action's argument. No leg runs then; held prompts must not delay it."""
        return False if Feature.UPDATE_WITHOUT_DRAIN in self.library.features else None

    async def _be_alone(self) -> None:
        """End or await all legs. Raises `Unavailable` if they do not end in time; a leg that can be
        paused, or computes a prompt alone, hangs in the library, which then starts again. So it
        does after a pause that failed: it would refuse all requests."""
        try:
            async with asyncio.timeout(self._settings.update_timeout_s):
                await self._quiesce()
        except TimeoutError:
            left = len(self.legs)
            if self._pauses or any(leg.is_context for leg in self.legs):
                await self._restart()
            raise Unavailable(
                f"{left} requests did not end within tensorrt_llm.update_timeout_s = "
                f"{self._settings.update_timeout_s:g}"
            ) from None
        except ForgeError:
            raise
        except Exception as error:  # Any error of the library.
            await self._restart()
            failed = f"the pause failed: {type(error).__name__}: {error}"
            raise Unavailable(f"engine 'tensorrt_llm': {failed}") from error

    async def _quiesce(self) -> None:
        """Wait until no leg runs; end those that can continue later."""
        if self._pauses:
            # The pause aborts all, so first all transfers must have arrived.
            await asyncio.gather(*(leg.arrived.wait() for leg in set(self.legs)))
            if self.legs:
                await self.engine.pause_generation()
                await self._ended()
                await self.engine.resume_generation()
        await self._ended()

    async def _ended(self) -> None:
        await asyncio.gather(*(leg.ended.wait() for leg in set(self.legs)))

    async def _restart(self) -> None:
        """Start again with the last whole version. A second failure ends the worker."""
        RESTARTS.inc()
        try:
            # A rank that hangs would delay its end, or the start, forever.
            limit_s = self._settings.update_timeout_s
            async with asyncio.timeout(limit_s):
                await self.close()
            async with asyncio.timeout(max(limit_s, _STARTS * self._start_s)):
                await self.start()
            if self._snapshot is not None:
                async with staged_update(self._snapshot, self._ranks, self._settings) as update:
                    await update.apply(drain=self._drain())
        except Exception as error:  # Any error of the library.
            self._die(f"cannot start again: {type(error).__name__}: {error}")

    def _note_failure(self, error: Exception) -> None:
        self._failures += 1
        log.warning("tensorrt_llm_request_failed", error=str(error), in_a_row=self._failures)
        proving = self._proof is not None and not self._proof.done()
        if self._failures >= _FAILURES_OF_A_DEAD_ENGINE and not proving:
            reason = f"{self._failures} requests in a row failed, the last: {error}"
            self._proof = asyncio.create_task(self._prove_alive(reason))

    async def _prove_alive(self, reason: str) -> None:
        """Compute a request of our own: requests may fail by themselves, again and again. Without
        an answer the engine has died for `reason`."""
        await self.gate.passed()
        engine = self._llm
        params = self.library.sampling_params(max_tokens=1, end_id=NO_END, seed=0, detokenize=False)
        try:
            async with asyncio.timeout(_PROOF_S), self.leg([0], params) as leg:
                await leg.result
        except (ForgeError, TimeoutError):
            # A restart in the meantime has ended it, or other requests have been served.
            if engine is self._llm and self._failures >= _FAILURES_OF_A_DEAD_ENGINE:
                self._die(reason)

    def _die(self, reason: str) -> None:
        if not self.died.done():
            self.died.set_result(EngineDied(reason))
