"""A whole service in one file: `python -m tests.support.runtime.echo_service --help`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forge.core.errors import ConfigError, FailedPrecondition
from forge.runtime.actors.actor import Actor
from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.actors.supervision import Restart
from forge.runtime.process import credential_reload
from forge.runtime.process.service import ServiceContext
from forge.runtime.process.startup import run
from forge.runtime.settings import ServiceConfig
from forge.runtime.telemetry import log
from tests.support.runtime.echo import FULL_NAME, EchoServicer, add_to_server


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoConfig(ServiceConfig):
    """Settings of the echo service."""

    kind: str = "echo"
    """Kind that it registers as."""
    becomes_ready: bool = True
    """false: serve once `ready` is called."""
    fail_start: bool = False
    """Refuse to start."""
    voice: str = ""
    """All echoes of a cluster have the same; empty: any."""
    reload_period_s: float = credential_reload.PERIOD_S
    """Between two looks at its files."""

    def agreed(self) -> Mapping[str, str]:
        return {"echo/voice": self.voice} if self.voice else {}


class Worker(Actor):
    """Crashes on request."""

    async def receive(self, message: Any) -> Any:
        raise KeyError(message)


class EchoApp:
    """Echoes, under the bootstrap's care."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._servicer = ControlledServicer(context)
        config: EchoConfig = context.config
        credential_reload.PERIOD_S = config.reload_period_s

    async def start(self) -> None:
        config: EchoConfig = self._context.config
        if config.fail_start:
            raise FailedPrecondition("the store is locked by another process")
        self._servicer.worker = await self._context.actors.spawn(
            Worker, name="worker", restart=Restart(max_restarts=0)
        )
        self._context.server.add_service(
            add_to_server, self._servicer, full_name=FULL_NAME, scopes=""
        )
        self._context.metadata["color"] = "red"
        self._context.ready = config.becomes_ready

    async def drain(self) -> None:
        log.info("echo_drained")

    async def stop(self) -> None:
        log.info("echo_stopped")


class ControlledServicer(EchoServicer):
    """Obeys a few more words: `ready`, `paint:<color>`, `break`, `misset`, `open`."""

    worker: ActorRef

    def __init__(self, context: ServiceContext) -> None:
        super().__init__()
        self._context = context

    async def _answer(self, text: str) -> str:
        what, _, rest = text.partition(":")
        match what:
            case "ready":
                self._context.set_ready()
            case "paint":
                self._context.metadata["color"] = rest
                await self._context.announce()
            case "break":
                self.worker.tell("break")
            case "misset":
                self._context.fail("voice", ConfigError("red is no voice"))
            case "open":
                self.gate.set()
            case _:
                return await super()._answer(text)
        return "done"


if __name__ == "__main__":
    run("echo", EchoConfig, lambda: EchoApp)
