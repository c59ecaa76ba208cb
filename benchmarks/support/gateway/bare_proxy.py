"""The least that a proxy can do: pass a request on, and the answer back as it comes.

No credentials, no record, no look inside. aiohttp and uvloop, as the gateway has them.

    python -m benchmarks.support.gateway.bare_proxy PORT UPSTREAM
"""

from __future__ import annotations

import asyncio
import sys

import uvloop
from aiohttp import ClientSession, web


async def serve(port: int, upstream: str) -> None:
    async with ClientSession(auto_decompress=False) as client:

        async def forward(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            headers = {"Content-Type": "application/json"}
            async with client.post(upstream + request.path, data=body, headers=headers) as answer:
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                return response

        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(sys.argv[1]), sys.argv[2]))
