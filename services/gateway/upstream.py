"""Sampling through whichever router is there.

Owns one Sample call: its deadline, its cancellation, its errors. Owns no retry: only who knows
what was already delivered can decide that.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import grpc.aio

from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.status import from_rpc_error
from forge.v1 import inference_pb2

if TYPE_CHECKING:
    from forge.v1.inference_pb2_grpc import InferenceServiceAsyncStub


class SampleCall:
    """One attempt to sample an answer; `abort` ends it from outside."""

    def __init__(self, remote: Remote[InferenceServiceAsyncStub], *, timeout_s: float) -> None:
        self._remote = remote
        self._timeout_s = timeout_s
        self.call_id = uuid.uuid4().hex
        self._call: Any = None
        self._aborted = asyncio.Event()

    @property
    def aborted(self) -> bool:
        return self._aborted.is_set()

    async def responses(
        self, request: inference_pb2.SampleRequest, *, wait_s: float
    ) -> AsyncGenerator[inference_pb2.SampleResponse]:
        """What the router sends, up to the end or until aborted. Waits up to `wait_s` for a
        router to appear. Raises the ForgeError that the router answered."""
        _, stub = await self._remote.pick(timeout_s=wait_s)
        if self._aborted.is_set():
            return
        self._call = stub.Sample(request, timeout=self._timeout_s)
        try:
            async for response in self._call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            # grpc cancels its reader; that is not a cancellation of this task.
            task = asyncio.current_task()
            if not self._aborted.is_set() or (task is not None and task.cancelling()):
                raise
        finally:
            self._call.cancel()

    def abort(self) -> None:
        self._aborted.set()
        if self._call is not None:
            self._call.cancel()
