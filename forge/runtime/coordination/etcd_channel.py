"""The gRPC channel to the members of an etcd: which member, and with which credentials.

Not here: calls and their errors; `forge.runtime.coordination.etcd` owns them.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from forge.core.errors import ConfigError, Unavailable
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.renewable_channel import RenewableChannel

_MEMBER_S = 1.5
"""Time to connect to one of several members, before the next one is tried."""
_LOOK_S = 0.5
_UNREACHABLE = grpc.ChannelConnectivity.TRANSIENT_FAILURE


class EtcdChannel(RenewableChannel):
    """A channel to the members of an etcd: to one target, or to one of several at a time.

    gRPC verifies all addresses of one target by the name of the first. With TLS each member has a
    certificate of its own, so each is a target of its own.
    """

    def __init__(
        self,
        targets: Sequence[str],
        options: Sequence[tuple[str, Any]],
        credentials: grpc.ChannelCredentials | None,
    ) -> None:
        self._targets, self._options, self._credentials = targets, options, credentials
        # The members share the load of many processes.
        self.member = random.randrange(len(targets))
        """Changes with each change of the target; modulo their number it is the target's index."""
        super().__init__(self._connect)
        self._following: asyncio.Task[None] | None = None

    def use(self, credentials: grpc.ChannelCredentials) -> None:
        """Connect later calls with these."""
        self._credentials = credentials
        self.renew()

    def leave(self, member: int) -> None:
        """Connect later calls to the next member, if `member` is still the present one."""
        if len(self._targets) > 1 and member == self.member:
            self.member += 1
            self.renew()

    async def find_member(self) -> None:
        """Connect to a member that can be reached; from then on leave one that no longer can."""
        if len(self._targets) == 1:
            return
        for _ in self._targets:
            member = self.member
            try:
                await asyncio.wait_for(self.channel_ready(), _MEMBER_S)
                break
            except TimeoutError:
                self.leave(member)
        # Not before: it would close the channel of that wait.
        self._following = asyncio.create_task(self._follow())

    async def close(self, grace: float | None = None) -> None:
        """Stop following members, and close the channel."""
        await cancel_and_wait(self._following)
        await super().close(grace)

    async def _follow(self) -> None:
        while True:
            member = self.member
            if self.get_state(try_to_connect=True) is _UNREACHABLE:
                self.leave(member)
            await asyncio.sleep(_LOOK_S)

    def _connect(self) -> grpc.aio.Channel:
        target = self._targets[self.member % len(self._targets)]
        if self._credentials is None:
            return grpc.aio.insecure_channel(target, options=self._options)
        return grpc.aio.secure_channel(target, self._credentials, options=self._options)


async def open_channel(endpoints: str, credentials: grpc.ChannelCredentials | None) -> EtcdChannel:
    """Open a channel to the endpoints; it reconnects within a second."""
    addresses = [address for address in map(_address, endpoints.split(",")) if address]
    if not addresses:
        raise ConfigError(f"etcd = {endpoints!r} names no host:port")
    if credentials is None and "https://" in endpoints:
        raise ConfigError(f"etcd = {endpoints!r} is TLS, so tls_ca must be set")
    targets = addresses
    if credentials is None and len(addresses) > 1:
        targets = ["ipv4:" + ",".join([await _resolve(address) for address in addresses])]
    options: list[tuple[str, Any]] = [
        ("grpc.lb_policy_name", "round_robin"),
        # etcd disconnects clients that ping more often than every 5 s.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 3_000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Despite its name: the longest time of one attempt to connect.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.enable_http_proxy", 0),
    ]
    channel = EtcdChannel(targets, options, credentials)
    await channel.find_member()
    return channel


def _address(endpoint: str) -> str:
    return endpoint.strip().removeprefix("https://").removeprefix("http://").rstrip("/")


async def _resolve(address: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, family=socket.AF_INET)
    except OSError as error:
        raise Unavailable(f"etcd = {address!r}: {error.strerror}") from None
    return f"{found[0][4][0]}:{port}"
