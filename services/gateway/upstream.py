"""Sampling through whichever router is there.

Owns one Sample call: its deadline, its cancellation, its errors. Owns no retry: only who knows
what was already delivered can decide that.
"""

from __future__ import annotations

import asyncio
import uuid
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

    async def begin(self, request: inference_pb2.SampleRequest, *, wait_s: float) -> None:
        """Asks some router, and waits up to `wait_s` for one to appear. Raises `Unavailable`."""
        _, stub = await self._remote.pick(timeout_s=wait_s)
        if not self._aborted.is_set():
            self._call = stub.Sample(request, timeout=self._timeout_s)

    async def read(self) -> inference_pb2.SampleResponse | None:
        """What the router sent next; None at its end, or once aborted. Raises the ForgeError that
        the router answered."""
        if self._call is None:
            return None
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            # grpc cancels its reader; that is not a cancellation of this task.
            task = asyncio.current_task()
            if not self._aborted.is_set() or (task is not None and task.cancelling()):
                raise
            return None
        return response if isinstance(response, inference_pb2.SampleResponse) else None

    def end(self) -> None:
        """Nothing more is wanted of this router."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def abort(self) -> None:
        self._aborted.set()
        if self._call is not None:
            self._call.cancel()
