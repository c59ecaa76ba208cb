"""Requests far beyond the context, in every protocol: refused, and their memory returns."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import psutil
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from forge.runtime.coordination import Instance
from forge.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support.gateway.stack import GatewayStack
from tests.support.runtime.etcd import EtcdServer

pytestmark = pytest.mark.faults

MIB = 1 << 20
TEXT = "hgf jkz " * (31 * MIB // 8)
"""A token for each byte."""
LONG_TOKEN = "x" * 512
"""With it, the size of the text alone does not show that it is too long."""
CONTEXT_TOKENS = 100_000
PEAK_BYTES = 512 * MIB
"""Several copies of a body: bytes, text, rendered text. Its tokens would take 6 GiB."""
KEPT_BYTES = 320 * MIB


@pytest.fixture(scope="module")
def stack(
    shared_etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayStack]:
    made = GatewayStack(
        folder=tmp_path_factory.mktemp("gateway"),
        etcd=shared_etcd,
        cluster="gateway-oversized",
        context_tokens=CONTEXT_TOKENS,
    )
    file = str(made.model_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_tokens([LONG_TOKEN])
    tokenizer.save(file)
    with made.running():
        yield made


class Memory:
    """Resident memory of a process, above that at the start."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._folder = Path(f"/proc/{pid}")
        self._start = 0
        self._start = self.kept

    @property
    def kept(self) -> int:
        return int(self._process.memory_info().rss) - self._start

    def reset_peak(self) -> None:
        (self._folder / "clear_refs").write_text("5")

    @property
    def peak(self) -> int:
        """Since the last reset."""
        lines = (self._folder / "status").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024 - self._start


@pytest.fixture(scope="module")
def memory(stack: GatewayStack) -> Memory:
    return Memory(stack.processes["gateway-0"].pid)


@pytest_asyncio.fixture
async def http(stack: GatewayStack, gateway: Instance) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": f"Bearer {stack.token('big:0:0')}"}
    base = f"http://{gateway.metadata['http']}"
    async with aiohttp.ClientSession(base, headers=headers) as client:
        yield client


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": messages or [{"role": "user", "content": "hi"}]} | more


def anthropic(**more: Any) -> dict[str, Any]:
    return {"model": "policy", "max_tokens": 9, "messages": [user(TEXT)]} | more


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def look(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look"} | more}


def properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(count)}}


BODIES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "chat": ("chat/completions", lambda: chat(user(TEXT))),
    "messages": ("chat/completions", lambda: chat(*[user("a")] * 150_000)),
    "tool": ("chat/completions", lambda: chat(tools=[look(description=TEXT)])),
    "tools": ("chat/completions", lambda: chat(tools=[look()] * 150_000)),
    "schema": (
        "chat/completions",
        lambda: chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": properties(150_000)},
            }
        ),
    ),
    "stop": ("chat/completions", lambda: chat(stop=[TEXT])),
    "responses": ("responses", lambda: {"model": "policy", "input": TEXT}),
    "completions": ("completions", lambda: {"model": "policy", "prompt": TEXT}),
    "anthropic": ("messages", anthropic),
    "count": ("messages/count_tokens", anthropic),
}


@pytest.mark.parametrize("body", BODIES)
async def test_an_oversized_request_is_refused_and_its_memory_returns(
    http: aiohttp.ClientSession, memory: Memory, body: str
) -> None:
    """31 MiB with a token for each byte get 400, as do too many parts and too long rules."""
    path, made = BODIES[body]
    async with http.post("/v1/chat/completions", json=chat()) as answer:
        assert answer.status == 200
    memory.reset_peak()
    async with http.post(f"/v1/{path}", data=json.dumps(made())) as answer:
        assert answer.status == 400, await answer.text()
    assert memory.peak < PEAK_BYTES
    assert memory.kept < KEPT_BYTES


async def test_an_oversized_grpc_request_is_refused_and_its_memory_returns(
    stack: GatewayStack, gateway: Instance, memory: Memory
) -> None:
    """The largest message of gRPC is INVALID_ARGUMENT."""
    memory.reset_peak()
    metadata = (("authorization", f"Bearer {stack.token('large:0:0')}"),)
    message = gateway_pb2.ChatMessage(role="user", content=TEXT[: 4 * MIB])
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        call = stub.Chat(gateway_pb2.ChatRequest(messages=[message]), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError, match="prompt is too long") as refused:
            await anext(aiter(call))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert memory.peak < PEAK_BYTES
    assert memory.kept < KEPT_BYTES
