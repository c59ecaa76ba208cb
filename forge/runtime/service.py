"""One shape for every service: how a process starts, serves, drains and ends.

    start: log, etcd, actors, app, listen, health SERVING, register lease, READY
    stop:  deregister, NOT_SERVING, drain, stop listening, stop actors, close stores, exit 0

Owns this order and nothing of what a service does. SIGTERM and SIGINT stop, at any moment of the
start too. An app that has started is drained, also when it could not be registered: it may hold
work before anybody sees it. An actor that crashes too often stops with exit code 1, so that whoever
supervises starts a fresh process. kill -9 needs no code here: the lease runs out, and what was
acknowledged was durable before.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import grpc.aio
import sdnotify
import uvloop

from forge.core.errors import ConfigError, ForgeError
from forge.runtime.actor_system import ActorSystem
from forge.runtime.clock_watch import ClockWatch
from forge.runtime.config import ServiceConfig
from forge.runtime.coordination import Coordinator, Instance, Registration
from forge.runtime.first_done import first_done
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.server import RpcServer
from forge.runtime.security import Security
from forge.runtime.telemetry import configure_logging, log, serve_metrics

CLOCK_OFFSET_KEY = "clock_offset_s"
"""Metadata of an instance whose host's clock is off: seconds ahead of its peers."""
EVERY_ADDRESS = ("0.0.0.0", "::", "[::]")

Stub = TypeVar("Stub")


@dataclass(slots=True, kw_only=True)
class ServiceContext:
    """What the bootstrap made for the service to use."""

    config: Any
    """The service's own config; a ServiceConfig."""
    security: Security
    coordinator: Coordinator
    channels: Channels
    actors: ActorSystem
    server: RpcServer
    metadata: dict[str, str] = field(default_factory=dict)
    """Registered with the lease; change it, then `await announce()`."""
    ready: bool = True
    """Set to False in `start` by a service that cannot serve yet; then call `set_ready`."""
    registration: Registration | None = None
    """The bootstrap's: set once others can see this process."""
    stop: Callable[[], None] = lambda: None
    """Ends the process in good order, as SIGTERM does."""
    fail: Callable[[str, BaseException], None] = lambda name, error: None
    """Ends it likewise, with exit code 1: the named part of the service cannot go on."""
    _became_ready: asyncio.Event = field(default_factory=asyncio.Event)
    _listens: asyncio.Event = field(default_factory=asyncio.Event)
    _address: str = ""

    def remote(self, kind: str, stub: Callable[[grpc.aio.Channel], Stub]) -> Remote[Stub]:
        """The instances of another kind, as one callable thing."""
        return Remote(self.coordinator, self.channels, kind=kind, stub=stub)

    async def announce(self) -> None:
        """Show the current metadata to everybody; at registration it goes without saying."""
        if self.registration is not None:
            await self.registration.update(self.metadata)

    async def announce_clock_offset(self, offset_s: float | None) -> None:
        """Show how far this host's clock is off; None: it is not."""
        shown = self.metadata.get(CLOCK_OFFSET_KEY)
        if offset_s is None:
            if self.metadata.pop(CLOCK_OFFSET_KEY, None) is not None:
                await self.announce()
        elif shown is None or abs(float(shown) - offset_s) > 1:
            self.metadata[CLOCK_OFFSET_KEY] = f"{offset_s:+.0f}"
            await self.announce()

    def set_ready(self) -> None:
        """Now it can serve: register and answer SERVING."""
        self.ready = True
        self._became_ready.set()

    async def until_ready(self) -> None:
        """Wait for `set_ready`."""
        await self._became_ready.wait()

    def set_listening(self, address: str) -> None:
        """The bootstrap's: the server listens, and others reach it by `address`."""
        self._address = address
        self._listens.set()

    async def until_listening(self) -> str:
        """Returns that address."""
        await self._listens.wait()
        return self._address


class ServiceApp(Protocol):
    """What a service is, as seen from here; `app.py` of each implements it."""

    def __init__(self, context: ServiceContext) -> None: ...

    async def start(self) -> None:
        """Spawn actors, add servicers."""

    async def drain(self) -> None:
        """Finish what is in flight; new work is no longer sent here."""

    async def stop(self) -> None:
        """Close stores; the actors have stopped."""


def serve(service: str, config: ServiceConfig, app_type: type[Any]) -> bool:
    """Serve until a signal ends it. Returns whether it failed while serving; raises ForgeError
    when it could not start."""
    if not config.instance_id:
        own_id = f"{service}-{socket.gethostname()}-{os.getpid()}"
        config = dataclasses.replace(config, instance_id=own_id)
    configure_logging(service, config.instance_id, level=config.log_level, file=config.log_file)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Process(service, config, app_type).live())


class _Process:
    """One service process, start to end."""

    def __init__(self, service: str, config: ServiceConfig, app_type: type[Any]) -> None:
        self._service = service
        self._config = config
        self._app_type = app_type
        self._systemd = sdnotify.SystemdNotifier()
        self._stopping = asyncio.Event()
        self._app_started = False
        """It may hold work from now on, seen by others or not."""
        self._failure: BaseException | None = None
        self._clock_watch: asyncio.Task[None] | None = None

    async def live(self) -> bool:
        """Returns whether it failed while serving. Raises ForgeError when it could not start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        async with AsyncExitStack() as undo:
            try:
                await self._serve(undo)
            except ForgeError as error:
                if self._config.log_file:
                    log.error("not_started", error=str(error))
                raise
            except Exception:
                log.error("crashed", exc_info=True)
                raise
        log.info("stopped", failed=self._failure is not None)
        return self._failure is not None

    async def _serve(self, undo: AsyncExitStack) -> None:
        try:
            # A signal ends a start that waits for others as promptly as it ends serving.
            if await self._unless_stopping(self._start(undo)):
                await self._stopping.wait()
        finally:
            if self._app_started:
                await self._drain()

    async def _unless_stopping(self, step: Coroutine[Any, Any, None]) -> bool:
        """Run a step to its end; cancel it and return False when a signal comes first."""
        task = asyncio.create_task(step)
        if task in await first_done(task, self._stopping.wait()):
            await task
            return True
        await asyncio.wait({task})
        return False

    async def _start(self, undo: AsyncExitStack) -> None:
        config = self._config
        log.info("starting", pid=os.getpid(), etcd=config.etcd, cluster=config.cluster)
        context = self._context = await self._make_context(undo)
        app = self._app = self._app_type(context)

        async def end() -> None:
            await context.actors.stop()
            if self._app_started:
                await app.stop()

        undo.push_async_callback(end)
        await app.start()
        self._app_started = True
        host = config.advertise_host or config.host
        metrics_port = serve_metrics(config.host, config.metrics_port)
        context.metadata.setdefault("metrics", f"{host}:{metrics_port}")
        address = f"{host}:{(await context.server.start()).rpartition(':')[2]}"
        context.set_listening(address)
        undo.push_async_callback(context.server.stop, grace_s=0.0)
        if not context.ready:
            # systemd waits for the process, not for weights that are still on their way to it.
            self._systemd.notify("READY=1")
            log.info("waiting_to_be_ready", address=address)
            await context.until_ready()
        await self._enter(address)

    async def _make_context(self, undo: AsyncExitStack) -> ServiceContext:
        config = self._config
        security = Security.from_config(config)
        # Asked before anything else is done: a wrong host is the config's fault, not the app's.
        security.server_credentials(config.host)
        if not config.advertise_host and config.host in EVERY_ADDRESS:
            raise ConfigError(
                f"host = {config.host!r} is every address of this host and none that others could "
                "call: set advertise_host to the one they reach it by"
            )
        coordinator = await Coordinator.connect(
            config.etcd,
            cluster=config.cluster,
            credentials=security.etcd_credentials(config.etcd),
        )
        undo.push_async_callback(coordinator.close)
        channels = Channels(security)
        undo.push_async_callback(channels.close)
        return ServiceContext(
            config=config,
            security=security,
            coordinator=coordinator,
            channels=channels,
            actors=ActorSystem(self._service, on_escalate=self._fail),
            server=RpcServer(
                service=self._service, host=config.host, port=config.port, security=security
            ),
            stop=self._stopping.set,
            fail=self._fail,
        )

    async def _enter(self, address: str) -> None:
        """Answer SERVING, then be found: in this order nobody is sent to a closed door."""
        context, config = self._context, self._config
        kind = getattr(self._app, "kind", "") or getattr(config, "kind", "") or self._service
        context.server.set_serving(True)
        entered = dict(context.metadata)
        context.registration = await context.coordinator.register(
            kind,
            config.instance_id,
            address,
            metadata=entered,
            ttl_s=config.lease_ttl_s,
            on_conflict=lambda error: self._fail("registration", error),
        )
        if context.metadata != entered:
            # Others find and call this process before it knows that it is registered.
            await context.announce()
        own = Instance(
            kind=kind, instance_id=config.instance_id, address=address, metadata={}, revision=0
        )
        watch = ClockWatch(
            context.coordinator, context.channels, own=own, on_offset=context.announce_clock_offset
        )
        self._clock_watch = asyncio.create_task(watch.run(), name="clock-watch")
        self._systemd.notify("READY=1")
        log.info("serving", kind=kind, address=address, metrics=context.metadata["metrics"])

    def _fail(self, name: str, error: BaseException) -> None:
        self._failure = self._failure or error
        log.error("service_fails", part=name, error=repr(error))
        self._stopping.set()

    async def _drain(self) -> None:
        """Leave discovery first, so that nobody sends new work; then finish the old."""
        drain_s = self._config.drain_s
        deadline_s = time.monotonic() + drain_s
        log.info("draining", at_most_s=drain_s)
        self._systemd.notify("STOPPING=1")
        if self._clock_watch is not None:
            self._clock_watch.cancel()
            await asyncio.wait({self._clock_watch})
        if self._context.registration is not None:
            await self._context.registration.close()
        self._context.server.set_serving(False)
        try:
            async with asyncio.timeout(drain_s):
                await self._app.drain()
        except (TimeoutError, ForgeError) as error:
            log.warning("drain_cut_short", at_most_s=drain_s, error=repr(error))
        await self._context.server.stop(grace_s=max(0.0, deadline_s - time.monotonic()))
