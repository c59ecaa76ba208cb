"""One attempt of a request: prefill on one worker, then decode on one, or both in one call.

A long prompt is handed over early: its decode worker is chosen with its prefill worker, and fetches
keys and values while they are computed. If that fails, another worker fetches the prompt after its
prefill.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from forge.core.errors import (
    DeadlineExceeded,
    ForgeError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from forge.runtime.telemetry import log
from forge.v1 import inference_pb2 as pb
from forge.v1.common_pb2 import SampledTokens
from services.inference.router.fleet.workers import Worker
from services.inference.router.messages import Abandoned, PlaceDecode, Placement
from services.inference.router.metrics import EARLY_DECODES
from services.inference.router.request.worker_calls import Settle, WorkerCalls

MOVES = (Unavailable, DeadlineExceeded, ResourceExhausted, NotFound)
"""Errors that another worker, or a later attempt, can cure."""


@dataclass(frozen=True, slots=True)
class _EarlyDecode:
    """A decode that began with the prefill of its prompt."""

    placement: Placement
    call: Any


@dataclass(slots=True, kw_only=True)
class SampleAttempt(WorkerCalls):
    """Continues an answer on the cheapest workers."""

    _early: _EarlyDecode | None = None

    async def run(self) -> AsyncGenerator[None, None]:
        """Prefill prompt and tokens so far, then sample until the end or a failure; yield after new
        tokens."""
        request = pb.PrefillRequest(
            # A new id: the leftovers of an earlier attempt must not be taken for this one's.
            request_id=secrets.token_hex(8),
            prompt_ids=self.answer.ids,
            sampling=self.answer.rest(),
            hold_s=self.config.router.hold_s,
            session_id=self.session_id,
        )
        placement = Placement()
        try:
            with self._settling(placement) as settle:
                await self._place_prefill(request, placement)
                source = placement.worker
                if source.prefills_in_decode:
                    answer = self._in_one_call(request, placement, settle)
                    async with aclosing(answer):
                        async for _ in answer:
                            yield
                    return
                read = await self._prefill(request, placement, settle)
            async with aclosing(self._decode_read(request, read, source)) as answer:
                async for _ in answer:
                    yield
        finally:
            self._drop_early()

    async def _decode_read(
        self, request: pb.PrefillRequest, read: pb.PrefillResponse, source: Worker
    ) -> AsyncGenerator[None, None]:
        """Take the token of prefill, then decode what `source` has read."""
        is_fetched = False
        try:
            self._take(read.first, source)
            first = SampledTokens()
            first.CopyFrom(read.first)
            first.ClearField("routed_experts")
            is_complete = self.answer.end_if_complete()
            yield
            if is_complete:
                return
            request_to_decode = self._decode_request(request, source.address, first=first)
            async with aclosing(self._decode(request_to_decode, source)) as decode:
                async for _ in decode:
                    is_fetched = True
                    yield
        finally:
            # The caller has left, or the next attempt prefills again: no fetch will come.
            if not is_fetched:
                self._release(source, request)

    async def _prefill(
        self, request: pb.PrefillRequest, placement: Placement, settle: Settle
    ) -> pb.PrefillResponse:
        """Prefill on the chosen worker."""
        worker = placement.worker
        await self._begin_early(request, placement)
        call = self.streams.prefill(worker, request, timeout_s=self._left_s())
        try:
            with worker.calls.during(call), self._refused(worker):
                read: pb.PrefillResponse = await call
        except BaseException:
            # It may be held, and its response on the way.
            self._release(worker, request)
            raise
        settle(self._prefilled(request, placement, read))
        return read

    def _release(self, worker: Worker, request: pb.PrefillRequest) -> None:
        self.streams.release(worker, request.request_id, session_id=self.session_id)

    async def _begin_early(self, request: pb.PrefillRequest, read_by: Placement) -> None:
        """Let a decode worker fetch the prompt while it is computed, if it is long and a worker is
        there that can."""
        least = self.config.router.early_hand_off_tokens
        source = read_by.worker
        if not least or read_by.tokens < least or source.samples or request.sampling.max_tokens < 2:
            return
        placement = Placement()
        message = PlaceDecode(
            ids=request.prompt_ids,
            session=self.session_id,
            floor=self.answer.version,
            read_by=source,
            early=True,
            needs=self._needs,
            placement=placement,
        )
        try:
            await self._ask(message)
        except ForgeError:
            # None can; a decode worker is chosen after the prefill.
            self._tell(Abandoned(placement=placement))
            return
        except BaseException:
            self._tell(Abandoned(placement=placement))
            raise
        decode = self._decode_request(request, source.address, early=True)
        try:
            call = self.streams.decode(placement.worker, decode, timeout_s=self._left_s())
        except BaseException:
            self._tell(Abandoned(placement=placement))
            raise
        self._early = _EarlyDecode(placement, call)

    def _drop_early(self) -> None:
        """End the early decode; its answer is not needed."""
        early, self._early = self._early, None
        if early is not None:
            early.call.cancel()
            self._tell(Abandoned(placement=early.placement))
            EARLY_DECODES.labels("dropped").inc()

    async def _decode(
        self, request: pb.DecodeRequest, source: Worker
    ) -> AsyncGenerator[None, None]:
        """Decode on the worker that has fetched the prompt early, else on the cheapest; `source`
        has the keys and values."""
        early = self._early
        if early is not None and early.placement.worker.version < self.answer.version:
            # Prefill has swapped before the prompt began; an answer's versions do not fall.
            self._drop_early()
            early = None
        if early is not None:
            self._early = None
            is_used = False
            try:
                with self._settling(early.placement) as settle:
                    sampled = self._sampled(early.call, early.call, early.placement, source, settle)
                    async with aclosing(sampled):
                        async for _ in sampled:
                            if not is_used:
                                EARLY_DECODES.labels("used").inc()
                                is_used = True
                            yield
                return
            except MOVES as error:
                if is_used:
                    raise
                EARLY_DECODES.labels("failed").inc()
                log.debug("early_decode_failed", error=str(error))
        placement = Placement()
        with self._settling(placement) as settle:
            await self._place_decode(request, source, placement)
            call = self.streams.decode(placement.worker, request, timeout_s=self._left_s())
            sampled = self._sampled(call, call, placement, source, settle)
            async with aclosing(sampled):
                async for _ in sampled:
                    yield

    async def _place_decode(
        self, request: pb.DecodeRequest, source: Worker, placement: Placement
    ) -> None:
        """Wait for a decode worker; prefill holds the keys and values meanwhile."""
        await self._place(
            PlaceDecode(
                ids=request.prompt_ids,
                session=self.session_id,
                floor=self.answer.version,
                read_by=source,
                needs=self._needs,
                placement=placement,
            )
        )
