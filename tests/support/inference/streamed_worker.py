"""A worker that answers by script, as the servicers behind a kept stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from forge.runtime.rpc.status import from_status
from forge.v1 import inference_pb2 as pb


class StreamContext:
    """The context of a call on a stream, for the scripted worker."""

    async def abort(self, code: grpc.StatusCode, details: str, pairs: Any) -> None:
        raise from_status(code, details, dict(pairs))


class StreamedWorker:
    """The scripted worker as the servicers of a stream."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    async def Prefill(self, request: pb.PrefillRequest, context: None) -> pb.PrefillResponse:
        read: pb.PrefillResponse = await self._worker.Prefill(request, StreamContext())
        return read

    def answer(self, request: pb.DecodeRequest) -> AsyncIterator[pb.DecodeResponse]:
        answer: AsyncIterator[pb.DecodeResponse] = self._worker.Decode(request, StreamContext())
        return answer

    def release(self, request_id: str) -> None:
        self._worker.held.discard(request_id)
