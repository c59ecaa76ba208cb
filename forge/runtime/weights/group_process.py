"""The process by which a trainer or a worker takes part in groups that receive weights.

Owns its life: it is started before it is needed, has one broadcast at a time, and is killed and
replaced after each one that fails, so that a hung or lost member costs the others a bounded time.
Not here: the members of a group, and the check of what arrives.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import psutil

from forge.core.errors import ConfigError, Unavailable
from forge.runtime.concurrency import child_start
from forge.runtime.concurrency.child_start import ChildProcess
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.security.tls import is_loopback
from forge.runtime.settings import ServiceConfig
from forge.runtime.settings.weight_group_settings import WeightGroupSettings
from forge.runtime.telemetry import log

GROUP_KEY = "weight_group"
"""Metadata of a worker: the backend of the groups that it joins."""
_PROGRAM = "forge.rl.file_broadcast"
_START_S = 120.0
"""Longest start: it imports torch."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def group_way(backend: str) -> str:
    """The way of an announcement: the trainer sends the version to a group of this backend."""
    return f"group/{backend}"


def require_private(settings: WeightGroupSettings, config: ServiceConfig) -> None:
    """For groups that are not off: raises `ConfigError` on a network where weights need encryption,
    which groups do not have with TLS either."""
    host = config.advertise_host or config.host
    if not config.insecure and not is_loopback(host):
        raise ConfigError(
            f"weight_group.backend = {settings.backend} sends weights without encryption, and "
            f"{host!r} is not a loopback address: use a private network and set insecure = true, "
            "or weight_group.backend = off"
        )


class GroupError(Unavailable):
    """A broadcast that failed, or did not begin."""


class GroupProcess:
    """This instance's part in groups; off until `start`."""

    def __init__(
        self,
        settings: WeightGroupSettings,
        *,
        host: str,
        device: str,
        announce: Callable[[bool], Awaitable[None]] | None = None,
    ) -> None:
        """`host`: address of this host for the other members; `device`: of the model; `announce`
        lets the others know whether the process can take part."""
        self.settings = settings
        self._announce = announce
        self._host = host
        self._device = device if settings.backend == "nccl" else "cpu"
        self._process: ChildProcess | None = None
        self._control: socket.socket | None = None
        self._starting: asyncio.Task[None] | None = None
        self._busy = self._closed = False
        self.started = False
        """Whether the process runs."""

    @property
    def ready(self) -> bool:
        """Whether a broadcast can begin."""
        return self.started and not self._busy

    def start(self) -> None:
        """Start the process, or replace it."""
        self._kill()
        if self._closed:
            return
        self._starting = asyncio.create_task(self._start(self._starting), name="weight-group")

    def revive(self) -> None:
        """Start the process again if its last start failed."""
        if self._starting is not None and self._starting.done() and self._control is None:
            self.start()

    async def close(self) -> None:
        """End the process, for good."""
        self._closed = True
        await cancel_and_wait(self._starting)
        self._kill()
        if self._process is not None:
            await self._process.wait()

    async def broadcast(
        self,
        file: int,
        order: Mapping[str, Any],
        observe: Callable[[Mapping[str, Any]], Awaitable[None]],
    ) -> None:
        """Send or receive a file with the fields of an `Order` of `forge.rl.file_broadcast`;
        `observe` gets each answer. Raises `GroupError`, or the error of `observe`; then the process
        has been replaced."""
        if not self.ready:
            self.revive()
            raise GroupError("the process for groups is not ready")
        self._busy, ended = True, False
        fields = {
            "backend": self.settings.backend,
            "device": self._device,
            "limit_s": self.settings.limit_s,
            **order,
        }
        try:
            async with asyncio.timeout(self.settings.limit_s):
                assert self._control is not None
                socket.send_fds(self._control, [json.dumps(fields).encode()], [file])
                while "ended" not in (answer := await self._answer(self.settings.silence_s)):
                    await observe(answer)
            ended = True
        except TimeoutError:
            raise GroupError(f"not complete after {self.settings.limit_s:g} s") from None
        except OSError as error:
            raise GroupError(f"the process for groups: {error}") from None
        finally:
            self._busy = False
            if not ended:
                self.start()

    async def _start(self, before: asyncio.Task[None] | None) -> None:
        await cancel_and_wait(before)
        if self._announce is not None:
            await self._announce(False)
        if self._process is not None:
            await self._process.wait()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            with theirs:
                self._process = await child_start.start(
                    *(sys.executable, "-m", _PROGRAM, str(theirs.fileno())),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_environment(self._host),
                    pass_fds=[theirs.fileno()],
                )
            self._control = ours
            await self._answer(_START_S)
            self.started = True
            if self._announce is not None:
                await self._announce(True)
        except (GroupError, OSError) as error:
            self._kill()
            log.error("weight_group_not_ready", error=str(error))

    async def _answer(self, silence_s: float) -> Mapping[str, Any]:
        assert self._control is not None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(silence_s):
                data = await loop.sock_recv(self._control, 1 << 16)
        except TimeoutError:
            raise GroupError(f"no data for {silence_s:g} s") from None
        if not data:
            raise GroupError("the process for groups has ended")
        answer: Mapping[str, Any] = json.loads(data)
        if error := answer.get("error"):
            raise GroupError(str(error))
        return answer

    def _kill(self) -> None:
        self.started = False
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
        if self._control is not None:
            self._control.close()
            self._control = None


def _environment(host: str) -> dict[str, str]:
    """The environment in which gloo and NCCL listen on the interface of `host` alone."""
    found = dict(os.environ)
    if (name := _interface(host)) is not None:
        for key in _INTERFACES:
            found.setdefault(key, name)
    return found


def _interface(host: str) -> str | None:
    try:
        address = ipaddress.ip_address(socket.getaddrinfo(host.strip("[]"), None)[0][4][0])
    except (OSError, ValueError):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            with suppress(ValueError):
                if ipaddress.ip_address(one.address.partition("%")[0]) == address:
                    return name
    return None
