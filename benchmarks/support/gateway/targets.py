"""The processes that `benchmarks.gateway` compares, all on loopback, all before one upstream.

- upstream: the mock itself, for what the load and the machine cost by themselves
- forge: the gateway with its real pool and etcd; verifies the session token, finds the context,
  renders and encodes what is new, streams the answer, parses it and records the turn on disk
- floor: `benchmarks.support.gateway.floor`: the gateway's streams to router and pool behind the
  same HTTP server, and nothing between them
- proxy: `benchmarks.support.gateway.bare_proxy`: passes bytes on; no credentials, no record
- litellm: LiteLLM's proxy with a master key, one model, no database, no log
- sglang_router: SGLang's router in its default policy (cache_aware), one worker; no credentials
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.support.gateway.chat_load import Target
from benchmarks.support.processes import ended, started
from forge.runtime.coordination import Coordinator
from forge.runtime.process.child_processes import dying_with_parent
from forge.runtime.security.tokens import Claims
from tests.support.gateway.chat_templates import save_model
from tests.support.pool.process import PoolProcess
from tests.support.runtime.etcd import EtcdServer, free_port

CLUSTER = "benchmark"
SHARD = "s0"
START_S = 300.0
PEERS = Path(".venv-peers/bin")
CONTEXT_TOKENS = 1 << 18
LEASE = ("--lease-ttl-s", "60")
"""Long, since a process that the load starves is not dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Targets of the measurement."""

    all: dict[str, Target]
    pool_pid: int
    answer: str
    """Answer of the upstream to every request."""


@asynccontextmanager
async def start_targets(folder: Path) -> AsyncIterator[Targets]:
    """Everything that is installed, started and answering."""
    async with AsyncExitStack() as undo:
        upstream = f"http://127.0.0.1:{free_port()}"
        stack = _ForgeStack(folder, undo, upstream)
        stack.start()
        plain = {"proxy": _bare_proxy, "litellm": _litellm, "sglang_router": _sglang_router}
        found = {"upstream": Target(name="upstream", url=_url(upstream), key=_no_key, pid=0)}
        for name, start in plain.items():
            port = free_port()
            process = start(port, upstream, folder)
            if process is None:
                continue
            undo.callback(ended, process)
            url = _url(f"http://127.0.0.1:{port}")
            found[name] = Target(name=name, url=url, key=_no_key, pid=process.pid)
        answer = await answer_of(found["upstream"])
        found["forge"] = await stack.target()
        found["floor"] = stack.floor
        for target in tuple(found.values()):
            try:
                await answer_of(target)
            except TimeoutError:
                log = folder / f"{target.name}.log"
                sys.stderr.write(f"{target.name} does not answer: {_last_line(log)}\n")
                del found[target.name]
        yield Targets(all=found, pool_pid=stack.pool.pid, answer=answer)


class _ForgeStack:
    def __init__(self, folder: Path, undo: AsyncExitStack, upstream: str) -> None:
        self.etcd = EtcdServer(folder / "etcd")
        self.pool = PoolProcess(folder / "pool", etcd=self.etcd, cluster=CLUSTER, shard=SHARD)
        self._folder = folder
        self._undo = undo
        self._port = upstream.rpartition(":")[2]
        self._sessions = itertools.count()

    def start(self) -> None:
        model = self._folder / "model"
        model.mkdir(parents=True)
        save_model("chatml", model, context_tokens=CONTEXT_TOKENS)
        self.etcd.start()
        self._undo.callback(self.etcd.stop)
        self.pool.start(*LEASE)
        self._undo.callback(self.pool.kill)
        self._process("benchmarks.support.gateway.mock_upstream", "--http-port", self._port)
        self._gateway = self._process("services.gateway", "--sessions.idle-s", "3600")
        port = str(free_port())
        floor = self._process("benchmarks.support.gateway.floor", "--http-port", port)
        url = _url(f"http://127.0.0.1:{port}")
        self.floor = Target(name="floor", url=url, key=_no_key, pid=floor.pid)

    async def target(self) -> Target:
        coordinator = await Coordinator.connect(self.etcd.endpoint, cluster=CLUSTER)
        for kind in ("pool", "router"):
            await coordinator.discover(kind).wait(timeout_s=START_S)
        (instance,) = await coordinator.discover("gateway").wait(timeout_s=START_S)
        await coordinator.close()
        url = _url(f"http://{instance.metadata['http']}")
        return Target(name="forge", url=url, key=self._token, pid=self._gateway.pid)

    def _token(self) -> str:
        """For a session of its own, as the scheduler would sign it."""
        task_id = f"bench-{next(self._sessions)}"
        claims = Claims(
            subject=f"{task_id}:0:0",
            scopes=frozenset({"session"}),
            trajectory_id=f"{task_id}:0:0",
            task_id=task_id,
            domain="code",
            pool_shard=SHARD,
        )
        return self.pool.keyring.sign(claims)

    def _process(self, module: str, *settings: str) -> subprocess.Popen[bytes]:
        flags = ["--model-path", str(self._folder / "model"), "--etcd", self.etcd.endpoint]
        flags += ["--cluster", CLUSTER, "--key-file", str(self._folder / "pool" / "key")]
        process = started(module, self._folder, [*flags, *LEASE, *settings])
        self._undo.callback(ended, process)
        return process


def _bare_proxy(port: int, upstream: str, folder: Path) -> subprocess.Popen[bytes]:
    return _quiet(
        [sys.executable, "-m", "benchmarks.support.gateway.bare_proxy", str(port), upstream],
        folder / "proxy.log",
    )


def _litellm(port: int, upstream: str, folder: Path) -> subprocess.Popen[bytes] | None:
    program = PEERS / "litellm"
    if not program.exists():
        return None
    config = folder / "litellm.yaml"
    config.write_text(
        "model_list:\n"
        "  - model_name: policy\n"
        "    litellm_params:\n"
        "      model: openai/policy\n"
        f"      api_base: {upstream}/v1\n"
        "      api_key: none\n"
        "litellm_settings:\n  telemetry: false\n  num_retries: 0\n"
        f"general_settings:\n  master_key: {_no_key()}\n"
    )
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    argv = [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    return _quiet(argv, folder / "litellm.log", **offline)


def _sglang_router(port: int, upstream: str, folder: Path) -> subprocess.Popen[bytes] | None:
    program = PEERS / "sglang-router"
    if not program.exists():
        return None
    argv = [str(program), "launch", "--worker-urls", upstream, "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--log-level", "warn", "--prometheus-port", str(free_port())]
    return _quiet(argv, folder / "sglang_router.log")


def _quiet(argv: list[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            dying_with_parent(argv),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
        )


async def answer_of(target: Target, *, max_tokens: int | None = None) -> str:
    """First answer of a target. Raises `TimeoutError`."""
    headers = {"Authorization": f"Bearer {target.key()}"}
    body: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "Hello."}]}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    async with asyncio.timeout(START_S), aiohttp.ClientSession() as client:
        while True:
            try:
                async with client.post(target.url, json=body, headers=headers) as response:
                    if response.status == 200:
                        found = await response.json()
                        return str(found["choices"][0]["message"]["content"])
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return lines[-1] if lines else "no log"


def _url(base: str) -> str:
    return f"{base}/v1/chat/completions"


def _no_key() -> str:
    return "sk-benchmark"
