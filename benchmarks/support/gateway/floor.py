"""The least that a gateway of this kind can do: HTTP in, a kept stream to the router, a turn to the
pool, events out.

The gateway's own streams, and nothing between them: no token is checked, nothing parsed, rendered,
encoded or decoded, every prompt is the same. What a gateway spends beyond this is its own work.

    python -m benchmarks.support.gateway.floor --http-port N ...
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from forge.runtime.coordination.shard_record import gone_text
from forge.runtime.process.service import ServiceContext
from forge.runtime.process.startup import run
from forge.runtime.settings import Port, ServiceConfig
from forge.v1 import common_pb2, inference_pb2, inference_pb2_grpc, pool_pb2_grpc
from services.gateway.actors.backlog import Backlog
from services.gateway.actors.shard_writer import Append, ShardWriter
from services.gateway.pool_client import Pool
from services.gateway.router.router_stream import RouterStreams
from services.gateway.router.sample_call import SampleCall

PROMPT_IDS = bytes(4 * 400)
EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": "' + b"word " * 8 + b'"}}]}\n\n'
END = b"data: [DONE]\n\n"
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorConfig(ServiceConfig):
    """Addresses to listen on and to record at."""

    http_port: Port = 0
    """Port to listen on."""
    model_path: str = ""
    """Not looked at."""
    pool_shard: str = "s0"
    """Shard that takes the turns."""


class FloorApp:
    """Wiring, as any service's."""

    kind = "gateway-floor"

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._turns = itertools.count()

    async def start(self) -> None:
        context, config = self._context, self._context.config
        routers = context.remote("router", inference_pb2_grpc.InferenceServiceStub)
        self._streams = RouterStreams(routers)
        pool = Pool(
            context.remote("pool", pool_pb2_grpc.PoolServiceStub),
            wait_s=1.0,
            timeout_s=TIMEOUT_S,
            gone=partial(gone_text, context.coordinator),
        )
        open_stream = partial(pool.open_append_stream, config.pool_shard)
        backlog = Backlog(pool_shard=config.pool_shard, max_bytes=1 << 30)
        self._writer = await context.actors.spawn(
            lambda: ShardWriter(backlog, open_stream, lambda _: None), name="writer"
        )
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", config.http_port).start()

    async def drain(self) -> None:
        """Calls end by themselves."""

    async def stop(self) -> None:
        await self._runner.cleanup()
        await self._streams.close_streams()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if b'"stream"' not in body:
            # Asked whether it is there.
            return web.json_response({"choices": [{"message": {"content": ""}}]})
        number = next(self._turns)
        asked = inference_pb2.SampleRequest(
            request_id=str(number),
            prompt_ids=PROMPT_IDS,
            sampling=common_pb2.SamplingParams(max_tokens=_max_tokens(body)),
            stream=True,
        )
        call = SampleCall(self._streams, timeout_s=TIMEOUT_S, retry_for_s=TIMEOUT_S, streamed=True)
        call.set_request(asked)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        tokens = common_pb2.SampledTokens()
        while (said := await call.read_response()) is not None:
            tokens = said.tokens
            if said.finish_reason:
                break
            if not response.prepared:
                await response.prepare(request)
            await response.write(EVENT)
        call.cancel_attempt()
        turn = common_pb2.Turn(
            trajectory_id=f"floor-{number}:0:0",
            parent_turn=-1,
            prompt_ids=PROMPT_IDS,
            sampled=tokens,
            finish_reason=common_pb2.FINISH_REASON_STOP,
        )
        self._writer.tell(Append(turn=turn))
        if not response.prepared:
            await response.prepare(request)
        await response.write_eof(EVENT + END)
        return response


def _max_tokens(body: bytes) -> int:
    """The pace of the answer, which the mock upstream reads from it."""
    found = re.search(rb'"max_tokens": (\d+)', body)
    return int(found[1]) if found else 1000


if __name__ == "__main__":
    run("gateway-floor", FloorConfig, lambda: FloorApp)
