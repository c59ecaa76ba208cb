"""Gateways of one host behind one port: each session is answered by one process."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from forge.core.trajectory import NO_PARENT
from forge.runtime.coordination import Coordinator
from forge.runtime.process.ports import free_ports
from tests.support.gateway.stack import GatewayStack, recorded
from tests.support.runtime.waiting import until

NAMES = ("gateway-shared-1", "gateway-shared-2")
SESSIONS = 12


@pytest.fixture(scope="module")
def port(stack: GatewayStack) -> int:
    """The port of two gateways."""
    shared, *metrics = free_ports(3)
    for name, metrics_port in zip(NAMES, metrics, strict=True):
        stack.start_gateway(
            name, "--http.shared-port", str(shared), "--metrics-port", str(metrics_port)
        )
        METRICS[name] = metrics_port
    return shared


METRICS: dict[str, int] = {}


@pytest_asyncio.fixture
async def url(stack: GatewayStack, port: int, own_coordinator: Coordinator) -> str:
    """Once both processes know each other: each has handed a connection over."""
    for name in NAMES:
        await stack.gateway(own_coordinator, name)
    base = f"http://127.0.0.1:{port}/v1"
    probes = itertools.count()

    async def all_hand_over() -> bool:
        key = stack.token(f"probe-{next(probes)}:0:0")
        headers = {"x-api-key": key}
        async with aiohttp.ClientSession(headers=headers) as http, http.get(f"{base}/models"):
            return all([(await counts(name))["handed_over"] for name in NAMES])

    if all(name in stack.processes for name in NAMES):
        await until(all_hand_over)
    return base


async def counts(name: str) -> Counter[str]:
    """Connections by result, rebuilt sessions and turns of one gateway."""
    address = f"http://127.0.0.1:{METRICS[name]}/metrics"
    async with aiohttp.ClientSession() as http, http.get(address) as response:
        text = await response.text()
    found: Counter[str] = Counter()
    shared = r'^forge_gateway_shared_port_connections_total\{result="(\w+)"\} (\S+)$'
    for result, value in re.findall(shared, text, re.M):
        found[result] = int(float(value))
    for key in ("sessions_rebuilt", "turns"):
        for value in re.findall(rf"^forge_gateway_{key}_total(?:\{{.*\}})? (\S+)$", text, re.M):
            found[key] += int(float(value))
    return found


async def said(url: str, token: str, *messages: Any) -> str:
    """One call on a connection of its own."""
    async with AsyncOpenAI(base_url=url, api_key=token, max_retries=0) as client:
        answer = await client.chat.completions.create(model="policy", messages=list(messages))
    return answer.choices[0].message.content or ""


def user(text: str) -> Any:
    return {"role": "user", "content": text}


async def play(stack: GatewayStack, url: str, trajectory_id: str) -> None:
    """Three turns, each on a new connection."""
    history: list[Any] = []
    for word in ("one", "two", "three"):
        history.append(user(f"SAY[[{word}]]"))
        answer = await said(url, stack.token(trajectory_id), *history)
        assert answer == word
        history.append({"role": "assistant", "content": answer})


async def test_session_is_answered_by_one_process_whichever_gets_its_connections(
    stack: GatewayStack, url: str, own_coordinator: Coordinator
) -> None:
    """Both processes hand over, no session is rebuilt or split, and both have sessions."""
    names = [f"shared-{number}:0:0" for number in range(SESSIONS)]
    before = [await counts(name) for name in NAMES]
    await asyncio.gather(*(play(stack, url, name) for name in names))
    first, second = [
        (await counts(name)) - earlier for name, earlier in zip(NAMES, before, strict=True)
    ]
    for one in (first, second):
        assert one["turns"] > 0 and one["handed_over"] > 0
        assert one["sessions_rebuilt"] == 0
    assert first["handed_over"] == second["received"]
    assert second["handed_over"] == first["received"]
    assert first["turns"] + second["turns"] == 3 * SESSIONS
    for name in names[:3]:
        async with stack.agent(
            await stack.gateway(own_coordinator, NAMES[0]), stack.token(name)
        ) as agent:
            await agent.close(min_turns=3)
        turns = (await recorded(stack, own_coordinator, name)).turns
        assert [turn.parent_turn for turn in turns] == [NO_PARENT, 0, 1]


async def test_requests_without_a_session_are_answered_where_they_arrive(
    stack: GatewayStack, url: str
) -> None:
    """Without a token, with a wrong one, and in the path; a header may come byte by byte."""
    async with aiohttp.ClientSession() as http:
        async with http.get(url.replace("/v1", "/healthz")) as health:
            assert health.status == 200
        async with http.get(f"{url}/models", headers={"x-api-key": "wrong"}) as wrong:
            assert wrong.status == 401
        token = stack.token("shared-path:0:0")
        async with http.get(url.replace("/v1", f"/s/{token}/v1/models")) as listed:
            assert listed.status == 200
    host, port = "127.0.0.1", int(url.split(":")[2].split("/")[0])
    reader, writer = await asyncio.open_connection(host, port)
    for byte in f"GET /v1/models HTTP/1.1\r\nHost: a\r\nx-api-key: {token}\r\n\r\n".encode():
        writer.write(bytes([byte]))
        await writer.drain()
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    writer.close()
    _, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /v1/mod")
    writer.write_eof()
    writer.close()
    assert await said(url, token, user("SAY[[still]]")) == "still"


@pytest.mark.faults
async def test_sessions_of_a_killed_process_are_answered_by_the_other(
    stack: GatewayStack, url: str
) -> None:
    """A socket that no process takes stays where it is, also before discovery knows."""
    stack.kill(NAMES[1])
    before = (await counts(NAMES[0]))["turns"]
    names = [f"shared-{number}:0:0" for number in range(3, SESSIONS)]

    async def answered(name: str) -> bool:
        try:
            return await said(url, stack.token(name), user("SAY[[again]]")) == "again"
        except Exception:
            return False  # Its connection was in the queue of the killed process.

    for name in names:
        await until(lambda name=name: answered(name))  # type: ignore[misc]
    assert (await counts(NAMES[0]))["turns"] - before >= len(names)
