"""The life of a service process: start, serve, drain, stop.

    start: log, etcd, agreement, actors, app, listen, health SERVING, register lease, READY
    stop:  deregister, NOT_SERVING, drain, stop listening, stop actors, close stores, exit 0

Owns this order. SIGTERM, SIGINT and SIGHUP stop a process, also during its start. A started app is
drained even if its registration failed: it may have work already. So an outage of etcd only delays
the registration. An actor that crashes too often ends the process with exit code 1, and the
supervisor starts a fresh one. After kill -9 the lease expires; acknowledged writes are durable.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Protocol, TypeVar

import grpc.aio
import sdnotify
import uvloop

from forge.core.errors import ConfigError, ForgeError, Unavailable
from forge.core.extras import DISTRIBUTION, extras_named
from forge.runtime.actors.actor_system import ActorSystem
from forge.runtime.concurrency.tasks import cancel_and_wait, first_done
from forge.runtime.coordination import Coordinator, Instance, Login, Registration
from forge.runtime.coordination.etcd import Refused
from forge.runtime.coordination.etcd_roles import etcd_user
from forge.runtime.coordination.leases import RETRY_S
from forge.runtime.process.agreement import Agreement
from forge.runtime.process.clock_watch import ClockWatch
from forge.runtime.process.credential_reload import reload_credentials
from forge.runtime.process.metrics_listener import serve_metrics
from forge.runtime.process.span_export import export_spans
from forge.runtime.process.stop_signals import on_stop_signal
from forge.runtime.process.watchdog import ends_unit, feed_watchdog, limit_s
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.server import RpcServer
from forge.runtime.security.audit import configure_audit
from forge.runtime.security.bearer import bearer_of
from forge.runtime.security.credentials import Security
from forge.runtime.security.issued_tokens import follow_revocations, read_revocations
from forge.runtime.settings import ServiceConfig
from forge.runtime.telemetry import configure_logging, log

CLOCK_OFFSET_KEY = "clock_offset_s"
"""Metadata of an instance with a wrong clock: seconds ahead of its peers."""
EVERY_ADDRESS = ("0.0.0.0", "::", "[::]")

Stub = TypeVar("Stub")
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class ServiceContext:
    """Objects that the bootstrap creates for the service."""

    config: Any
    """The service's own config; a ServiceConfig."""
    security: Security
    coordinator: Coordinator
    channels: Channels
    actors: ActorSystem
    server: RpcServer
    metadata: dict[str, str] = field(default_factory=dict)
    """Metadata in discovery; after a change, `await announce()`."""
    ready: bool = True
    """A service that cannot serve yet sets False in `start`, and calls `set_ready` later."""
    registration: Registration | None = None
    """Set by the bootstrap once this process is in discovery."""
    registered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once this process is in discovery and its settings agree with those of the others."""
    stop: Callable[[], None] = lambda: None
    """Drains and ends the process, as SIGTERM does."""
    stand_by: Callable[[], None] = lambda: None
    """Tells systemd that the process has started, also while `start` waits for an election."""
    fail: Callable[[str, BaseException], None] = lambda name, error: None
    """Drains and ends the process with exit code 1, or 2 for a `ConfigError`: the named part has
    failed."""
    undo: AsyncExitStack = field(default_factory=AsyncExitStack)
    """Ends the parts of the process at its stop, the last one first."""
    _became_ready: asyncio.Event = field(default_factory=asyncio.Event)
    _listens: asyncio.Event = field(default_factory=asyncio.Event)
    _address: str = ""

    def remote(self, kind: str, stub: Callable[[grpc.aio.Channel], Stub]) -> Remote[Stub]:
        """Return a client of another kind's instances."""
        return Remote(self.coordinator, self.channels, kind=kind, stub=stub)

    def keep_running(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        """Run an endless task until the process stops; if it ends, the process fails."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                self.fail(name, task.exception() or RuntimeError("it has returned"))

        task = asyncio.create_task(work, name=name)
        task.add_done_callback(ended)
        self.undo.push_async_callback(cancel_and_wait, task)

    async def announce(self) -> None:
        """Write the metadata to discovery; before the registration it does nothing."""
        if self.registration is not None:
            await self.registration.update(self.metadata)

    def renew(self) -> None:
        """Connect later calls, to etcd too, with the present certificate files."""
        self.channels.renew()
        if (credentials := self.security.etcd_credentials(self.config.etcd)) is not None:
            self.coordinator.use(credentials)

    async def announce_clock_offset(self, offset_s: float | None) -> None:
        """Announce the offset of this host's clock; None: the clock is right."""
        shown = self.metadata.get(CLOCK_OFFSET_KEY)
        if offset_s is None:
            if self.metadata.pop(CLOCK_OFFSET_KEY, None) is not None:
                await self.announce()
        elif shown is None or abs(float(shown) - offset_s) > 1:
            self.metadata[CLOCK_OFFSET_KEY] = f"{offset_s:+.0f}"
            await self.announce()

    def set_ready(self) -> None:
        """Let the bootstrap answer SERVING and register."""
        self.ready = True
        self._became_ready.set()

    async def until_ready(self) -> None:
        """Wait for `set_ready`."""
        await self._became_ready.wait()

    def set_listening(self, address: str) -> None:
        """Called by the bootstrap: the server listens at `address`."""
        self._address = address
        self._listens.set()

    async def until_listening(self) -> str:
        """Wait until the server listens; return its address."""
        await self._listens.wait()
        return self._address


async def _through_outage(step: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Repeat a step of the registration until etcd answers: the app may have work already. Raises
    `Refused` and all errors but Unavailable."""
    waits = False
    while True:
        try:
            return await step()
        except Refused:
            raise
        except Unavailable as error:
            if not waits:
                log.warning("registration_waits", error=str(error))
            waits = True
        await asyncio.sleep(RETRY_S)


class ServiceApp(Protocol):
    """Contract of a service; its `app.py` implements it."""

    def __init__(self, context: ServiceContext) -> None: ...

    async def start(self) -> None:
        """Spawn actors, add servicers."""

    async def drain(self) -> None:
        """Finish the work in flight; no new work arrives."""

    async def stop(self) -> None:
        """Close stores; the actors have stopped."""


def serve(service: str, config: ServiceConfig, app_type: type[Any]) -> BaseException | None:
    """Serve until a signal. Returns the failure that ended it, if one did; raises ForgeError when
    it could not start."""
    if not config.instance_id:
        own_id = f"{service}-{socket.gethostname()}-{os.getpid()}"
        config = dataclasses.replace(config, instance_id=own_id)
    configure_logging(service, config.instance_id, level=config.log_level, file=config.log_file)
    configure_audit(service, config.instance_id, file=config.audit_file)
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
        """From now on it may have work, registered or not."""
        self._failure: BaseException | None = None
        self._clock_watch: asyncio.Task[None] | None = None

    async def live(self) -> BaseException | None:
        """Returns the failure that ended it, if one did. Raises ForgeError when it could not
        start."""
        on_stop_signal(lambda _: self._stopping.set())
        async with AsyncExitStack() as undo:
            try:
                export_spans(self._service, self._config, undo)
                with extras_named(self._service):
                    await self._serve(undo)
            except ForgeError as error:
                if self._config.log_file:
                    log.error("not_started", error=str(error))
                raise
            except Exception:
                log.error("crashed", exc_info=True)
                raise
        # With the cause: supervisors show the last line of the log.
        cause = {"error": f"{type(self._failure).__name__}: {self._failure}"}
        log.info("stopped", failed=bool(self._failure), **(cause if self._failure else {}))
        return self._failure

    async def _serve(self, undo: AsyncExitStack) -> None:
        try:
            # A signal also ends a start that waits for other services.
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
        await cancel_and_wait(task)
        return False

    async def _start(self, undo: AsyncExitStack) -> None:
        config = self._config
        log.info("starting", pid=os.getpid(), etcd=config.etcd, cluster=config.cluster)
        context = self._context = await self._make_context(undo)
        app = self._app = self._app_type(context)
        self._kind = getattr(app, "kind", "") or getattr(config, "kind", "") or self._service
        self._agreement = Agreement(context.coordinator, config, kind=self._kind)
        context.metadata |= self._agreement.metadata

        async def end() -> None:
            await context.actors.stop()
            if self._app_started:
                await app.stop()

        undo.push_async_callback(end)
        if watchdog_s := limit_s(os.environ):
            feeding = feed_watchdog(self._systemd, context.actors, watchdog_s)
            context.keep_running(feeding, name="watchdog")
        await self._agreement.check()
        await self._while_agreed(app.start())
        self._app_started = True
        host = config.advertise_host or config.host
        metrics_port = serve_metrics(config.host, config.metrics_port, context.security)
        context.metadata.setdefault("metrics", f"{host}:{metrics_port}")
        context.metadata.setdefault("version", metadata.version(DISTRIBUTION))
        address = f"{host}:{(await context.server.start()).rpartition(':')[2]}"
        context.set_listening(address)
        undo.push_async_callback(context.server.stop, grace_s=0.0)
        if not context.ready:
            # systemd waits for the process, not for its weights.
            context.stand_by()
            log.info("waiting_to_be_ready", address=address)
            await self._while_agreed(context.until_ready())
        await self._enter(address)

    async def _while_agreed(self, step: Coroutine[Any, Any, None]) -> None:
        """Run a step of the start, which may take hours; another instance may register meanwhile.
        Raises ConfigError when that has other settings."""
        task = asyncio.create_task(step)
        try:
            (ended, *_) = await first_done(task, self._agreement.watch())
        finally:
            await cancel_and_wait(task)
        await ended

    async def _make_context(self, undo: AsyncExitStack) -> ServiceContext:
        config = self._config
        security = self._security()
        # Checked first: a wrong host is an error of the settings, not of the app.
        security.server_credentials(config.host)
        if not config.advertise_host and config.host in EVERY_ADDRESS:
            raise ConfigError(
                f"host = {config.host!r} is every address of this host and none that others could "
                "call: set advertise_host to the one they reach it by"
            )
        coordinator = await self._connect(security)
        undo.push_async_callback(coordinator.close)
        channels = Channels(security)
        undo.push_async_callback(channels.close)
        # Before the server listens: a revoked token is never accepted.
        await read_revocations(coordinator, security)
        context = ServiceContext(
            config=config,
            security=security,
            coordinator=coordinator,
            channels=channels,
            actors=ActorSystem(self._service, on_escalate=self._fail),
            server=RpcServer(
                service=self._service, host=config.host, port=config.port, security=security
            ),
            stop=self._stopping.set,
            stand_by=lambda: self._systemd.notify("READY=1"),
            fail=self._fail,
            undo=undo,
        )
        context.keep_running(follow_revocations(coordinator, security), name="revocations")
        # Others verify the entry of this process: a new key signs it again.
        reload = reload_credentials(security, on_key=context.announce, on_tls=context.renew)
        context.keep_running(reload, name="credentials")
        return context

    async def _connect(self, security: Security) -> Coordinator:
        config = self._config
        return await Coordinator.connect(
            config.etcd,
            cluster=config.cluster,
            credentials=security.etcd_credentials(config.etcd),
            login=Login.of(
                config.etcd_user,
                config.etcd_password_file,
                default_user=etcd_user(config.cluster, self._service),
            ),
            signatures=security,
        )

    def _security(self) -> Security:
        config = self._config
        # Only the settings of a runner have a token_file.
        file = getattr(config, "token_file", None)
        state = getattr(config, "token_state_file", "")
        bearer = None if file is None or config.key_file else bearer_of(file, state_file=state)
        return Security.from_config(config, bearer=bearer)

    async def _enter(self, address: str) -> None:
        """Answer SERVING, then register: every registered instance serves."""
        context, config, kind = self._context, self._config, self._kind
        context.server.set_serving(True)
        entered = dict(context.metadata)
        context.registration = await _through_outage(
            lambda: context.coordinator.register(
                kind,
                config.instance_id,
                address,
                metadata=entered,
                ttl_s=config.lease_ttl_s,
                on_conflict=lambda error: self._fail("registration", error),
            )
        )
        await _through_outage(lambda: self._agreement.check(registered=True))
        context.registered.set()
        if context.metadata != entered:
            # Calls may change the metadata before `register` returns.
            await context.announce()
        own = Instance(
            kind=kind, instance_id=config.instance_id, address=address, metadata={}, revision=0
        )
        watch = ClockWatch(
            context.coordinator, context.channels, own=own, on_offset=context.announce_clock_offset
        )
        self._clock_watch = asyncio.create_task(watch.run(), name="clock-watch")
        context.stand_by()
        log.info("serving", kind=kind, address=address, metrics=context.metadata["metrics"])

    def _fail(self, name: str, error: BaseException) -> None:
        self._failure = self._failure or error
        log.error("service_part_failed", part=name, error=repr(error))
        self._stopping.set()

    async def _drain(self) -> None:
        """Leave discovery first, so that no new work arrives; then finish the work in flight."""
        drain_s = self._config.drain_s
        deadline_s = time.monotonic() + drain_s
        log.info("draining", at_most_s=drain_s)
        if ends_unit(os.environ):
            self._systemd.notify("STOPPING=1")
        await cancel_and_wait(self._clock_watch)
        if self._context.registration is not None:
            await self._context.registration.close()
        self._context.server.set_serving(False)
        try:
            async with asyncio.timeout(drain_s):
                await self._app.drain()
        except (TimeoutError, ForgeError) as error:
            log.warning("drain_cut_short", at_most_s=drain_s, error=repr(error))
        await self._context.server.stop(grace_s=max(0.0, deadline_s - time.monotonic()))
