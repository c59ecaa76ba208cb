"""Requests that a WebSocket keeps for the next one count as bodies in memory."""

from __future__ import annotations

import aiohttp
from prometheus_client import REGISTRY

from tests.support.gateway.limits import edge_limits
from tests.support.gateway.scripted_turns import ScriptedTurns, served
from tests.support.runtime.waiting import until

KEY = {"Authorization": "Bearer k"}
WARM = """{"type": "response.create", "model": "chatml-test", "generate": false, "input": [%s]}"""


def held_bytes() -> float:
    return REGISTRY.get_sample_value("forge_gateway_body_bytes") or 0.0


async def test_kept_requests_of_sockets_are_limited() -> None:
    """One above the limit is refused; the end of a connection makes room."""
    limits = edge_limits(most_bytes=5000)
    async with (
        served(ScriptedTurns(), limits=limits) as url,
        aiohttp.ClientSession(headers=KEY) as client,
        client.ws_connect(f"{url}/v1/responses") as first,
        client.ws_connect(f"{url}/v1/responses") as second,
    ):
        for _ in range(2):
            await first.send_str(WARM % (" " * 2000))
            while (event := await first.receive_json(timeout=60.0))["type"] != "response.completed":
                assert event["type"] != "error", event
            await until(lambda: held_bytes() == 2002)
        await second.send_str(WARM % (" " * 2000))
        refused = await second.receive_json(timeout=60.0)
        assert (refused["type"], refused["status"]) == ("error", 429)
        await first.close()
        await until(lambda: not held_bytes())
        await second.send_str(WARM % (" " * 2000))
        assert (await second.receive_json(timeout=60.0))["type"] == "response.created"
