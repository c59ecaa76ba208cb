"""A proxy that says of an overflow what the gateway said before it used the clients' words.

With it a test shows that an agent needs those words: everything else passes unchanged.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

_WORDS = re.compile(rb"prompt is too long: (\d+) tokens > (\d+) maximum")


@asynccontextmanager
async def old_wording(gateway_url: str) -> AsyncIterator[str]:
    """Where the proxy listens."""
    async with aiohttp.ClientSession(auto_decompress=False) as http:

        async def forward(request: web.Request) -> web.StreamResponse:
            headers = {
                name: value
                for name, value in request.headers.items()
                if name.lower()
                in {"authorization", "x-api-key", "content-type", "anthropic-version"}
            }
            url = gateway_url + request.path_qs
            body = await request.read()
            async with http.request(request.method, url, data=body, headers=headers) as answer:
                said = await answer.read()
                if found := _WORDS.search(said):
                    return _refusal(request, int(found[1]), int(found[2]) + 1)
                kind = answer.headers.get("Content-Type", "application/json")
                return web.Response(body=said, status=answer.status, headers={"Content-Type": kind})

        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def _refusal(request: web.Request, tokens: int, limit: int) -> web.Response:
    """Status 400, in a stream too, with the message that there was."""
    message = f"the model's context is {limit} tokens, answer included; the messages take {tokens}"
    error = {"type": "invalid_request_error", "message": message}
    if request.path.endswith("/messages"):
        error["message"] = f"prompt is too long: {message}"
        return web.json_response({"type": "error", "error": error}, status=400)
    coded = error | {"param": None, "code": "context_length_exceeded"}
    return web.json_response({"error": coded}, status=400)
