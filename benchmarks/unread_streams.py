"""Memory of a gateway whose clients do not read their streamed answers.

    python -m benchmarks.unread_streams [--quick] [--json FILE]

A gateway with a real pool and a scripted engine, which streams token by token, with log-probs.
First clients read their answers, which warms up; then as many others send a request each, with
small receive buffers, and read nothing until the last answer is complete. The memory of the
gateway's process is counted, sessions included, and that of all TCP buffers of the machine.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.support.cpu import rss_bytes
from benchmarks.support.report import arguments, keep, show
from forge.runtime.coordination import Coordinator
from tests.support.gateway.stack import GatewayStack
from tests.support.runtime.etcd import EtcdServer

GATEWAY = "gateway-0"
CLUSTER = "unread"
TOKENS = 1000
"""Of an answer; each is an event of the stream."""
PACE_S = 0.02
RECEIVE_BYTES = 4096
LOOK_S = 0.5


async def measure(*, streams: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as folder:
        etcd = EtcdServer(Path(folder) / "etcd")
        etcd.start()
        stack = GatewayStack(
            folder=Path(folder) / "stack", etcd=etcd, cluster=CLUSTER, context_tokens=1 << 14
        )
        try:
            stack.start()
            return await _measure(stack, streams=streams)
        finally:
            stack.stop()
            etcd.stop()


async def _measure(stack: GatewayStack, *, streams: int) -> dict[str, float]:
    coordinator = await Coordinator.connect(stack.etcd.endpoint, cluster=CLUSTER)
    address = (await stack.gateway(coordinator, GATEWAY)).metadata["http"]
    await coordinator.close()
    names = (f"bench-{number}:0:0" for number in range(2 * streams))
    read = [_begun(stack, address, name) for name in _first(names, streams)]
    sizes = await asyncio.gather(*map(_answer_bytes, read))
    pid = stack.processes[GATEWAY].pid
    before, kernel_before = rss_bytes(pid), _tcp_bytes()
    unread = [_begun(stack, address, name) for name in _first(names, streams)]
    most = kernel_most = 0
    while len(stack.requests_file.read_text().splitlines()) < 2 * streams:
        await asyncio.sleep(LOOK_S)
        most, kernel_most = max(most, rss_bytes(pid)), max(kernel_most, _tcp_bytes())
    for connection in unread:
        connection.close()
    return {
        "streams": float(streams),
        "answer_kib": max(sizes) / 1024,
        "process_kib_per_stream": (most - before) / streams / 1024,
        "tcp_kib_per_stream": (kernel_most - kernel_before) / streams / 1024,
        "process_mib": most / (1 << 20),
    }


def _first(names: Iterator[str], count: int) -> list[str]:
    return [next(names) for _ in range(count)]


def _begun(stack: GatewayStack, address: str, name: str) -> socket.socket:
    """A connection with a request, whose answer waits to be read."""
    script = f"PACE[[{PACE_S}]] SAY[[{'x' * (TOKENS - 1)}]]"
    body = json.dumps(
        {
            "model": "policy",
            "stream": True,
            "logprobs": True,
            "messages": [{"role": "user", "content": script}],
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n"
        f"Authorization: Bearer {stack.token(name)}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    host, _, port = address.rpartition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    connection.connect((host, int(port)))
    connection.sendall(head.encode() + body)
    connection.setblocking(False)
    return connection


async def _answer_bytes(connection: socket.socket) -> int:
    size_bytes = 0
    loop = asyncio.get_running_loop()
    while received := await loop.sock_recv(connection, 1 << 16):
        size_bytes += len(received)
    connection.close()
    return size_bytes


def _tcp_bytes() -> int:
    """Memory of the buffers of all TCP sockets."""
    (line,) = (
        line for line in Path("/proc/net/sockstat").read_text().splitlines() if "TCP:" in line
    )
    words = line.split()
    return int(words[words.index("mem") + 1]) * resource.getpagesize()


def main() -> None:
    options = arguments(__doc__, quick="50 streams").parse_args()
    numbers = asyncio.run(measure(streams=50 if options.quick else 500))
    show("a gateway with unread streams", numbers)
    keep(numbers, options.json)


if __name__ == "__main__":
    main()
