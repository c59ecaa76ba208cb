"""Cost of one port for several gateways.

    python -m benchmarks.shared_port [--quick] [--json FILE]

Two gateways with a real pool and a scripted engine. Sessions of three turns, each turn on a
connection of its own, in three ways in interleaved rounds:

- own: all turns of a session at the own port of one gateway, as runners call;
- shared: at the port that both share, where half of the connections are handed over;
- spread: turns go to both gateways by turns, as if a shared port handed nothing over.

Work is the CPU time of both gateways for each call; medians of the rounds count.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.support.cpu import cpu_s
from benchmarks.support.report import arguments, keep, show
from forge.runtime.coordination import Coordinator
from forge.runtime.process.ports import free_ports
from tests.support.gateway.stack import GatewayStack
from tests.support.runtime.etcd import EtcdServer

NAMES = ("gateway-1", "gateway-2")
CLUSTER = "shared-port"
CONCURRENCY = 8
TURNS = 3
WORDS = ("one", "two", "three")

Route = Callable[[int, int], str]
"""Returns the base URL of a turn of a session."""


async def measure(*, rounds: int, sessions: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as folder:
        etcd = EtcdServer(Path(folder) / "etcd")
        etcd.start()
        stack = GatewayStack(folder=Path(folder) / "stack", etcd=etcd, cluster=CLUSTER)
        try:
            return await _measure(stack, rounds=rounds, sessions=sessions)
        finally:
            stack.stop()
            etcd.stop()


async def _measure(stack: GatewayStack, *, rounds: int, sessions: int) -> dict[str, float]:
    (port,) = free_ports(1)
    stack.start()
    for name in NAMES:
        stack.start_gateway(name, "--http.shared-port", str(port))
    coordinator = await Coordinator.connect(stack.etcd.endpoint, cluster=CLUSTER)
    gateways = [await stack.gateway(coordinator, name) for name in NAMES]
    own = [f"http://{gateway.metadata['http']}" for gateway in gateways]
    routes: dict[str, Route] = {
        "own": lambda session, turn: own[session % 2],
        "shared": lambda session, turn: f"http://127.0.0.1:{port}",
        "spread": lambda session, turn: own[(session + turn) % 2],
    }
    numbers = itertools.count()
    found: dict[str, list[float]] = {name: [] for name in routes}
    for round_ in range(-1, rounds):
        for name, route in routes.items():
            spent = await _run(stack, route, itertools.islice(numbers, sessions))
            if round_ >= 0:  # The first round warms up.
                found[name].append(1000 * spent / (sessions * TURNS))
    await coordinator.close()
    medians = {f"{name}.cpu_ms_per_call": statistics.median(found[name]) for name in found}
    ratios = {
        f"{name}_over_own": statistics.median(
            one / base for one, base in zip(found[name], found["own"], strict=True)
        )
        for name in ("shared", "spread")
    }
    return medians | ratios


async def _run(stack: GatewayStack, route: Route, sessions: Iterator[int]) -> float:
    """Returns the CPU seconds of both gateways."""
    pids = [stack.processes[name].pid for name in NAMES]
    before_s = sum(map(cpu_s, pids))

    async def work() -> None:
        for session in sessions:
            await _play(stack, route, session)

    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    return sum(map(cpu_s, pids)) - before_s


async def _play(stack: GatewayStack, route: Route, session: int) -> None:
    headers = {"Authorization": f"Bearer {stack.token(f'bench-{session}:0:0')}"}
    history: list[dict[str, Any]] = []
    for turn, word in enumerate(WORDS):
        history.append({"role": "user", "content": f"SAY[[{word}]]"})
        body = {"model": "policy", "messages": history}
        url = f"{route(session, turn)}/v1/chat/completions"
        async with (
            aiohttp.ClientSession(headers=headers) as client,
            client.post(url, json=body) as response,
        ):
            answer = (await response.json())["choices"][0]["message"]
        history.append({"role": "assistant", "content": answer["content"]})


def main() -> None:
    options = arguments(__doc__, quick="one round of few sessions").parse_args()
    rounds, sessions = (1, 40) if options.quick else (5, 200)
    numbers = asyncio.run(measure(rounds=rounds, sessions=sessions))
    show("one port for two gateways", numbers)
    keep(numbers, options.json)


if __name__ == "__main__":
    main()
