"""Channels to other processes: one per address, with token, trace context and keepalive.

Wrapped multicallables attach both: gRPC interceptors cost more than the call itself on the
loopback interface.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import grpc
import grpc.aio

from forge.runtime.renewable_channel import RenewableChannel
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import audience_of
from forge.runtime.tracing import current_span
from forge.runtime.tracing.traceparent import HEADER

Stub = TypeVar("Stub")

MAX_MESSAGE_BYTES = (4 << 20) + (64 << 10)
"""4 MiB of payload and room for the other fields; larger payloads travel in chunks."""
MAX_REFUSED_BYTES = 4 * MAX_MESSAGE_BYTES
"""Up to here a message is received, refused and counted; gRPC drops larger ones."""

IDLE_S = 600.0
"""Time without a new call after which a channel may retire."""

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_REFUSED_BYTES),
    # Detects a lost host within 25 s even without traffic.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Reconnects to a restarted peer at once, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name: the longest time of one attempt to connect.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Addresses come from discovery: no proxy of the environment.
    ("grpc.enable_http_proxy", 0),
)


def blocking_channel(address: str, security: Security) -> grpc.Channel:
    """Open a channel for threads; each call passes its own token. Raises ConfigError where TLS is
    needed but not set."""
    credentials = security.channel_credentials(address)
    if credentials is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)


class Channels:
    """All channels of one process, opened on demand. When a further one opens, those without a new
    call for `IDLE_S` retire: addresses of ended processes do not add up. A stub that someone has
    kept opens its channel again."""

    def __init__(self, security: Security, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._security = security
        self._clock = clock
        self._known: WeakValueDictionary[str, _AuthorizedChannel] = WeakValueDictionary()
        """Those whose stubs someone has kept, too."""
        self._channels: dict[str, _AuthorizedChannel] = {}
        """Those that are open, or have calls in flight."""
        self._stubs: dict[tuple[str, Callable[[grpc.aio.Channel], Any]], Any] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        """Return the channel to "host:port". Its calls carry this process's token unless
        they pass an `authorization`. Raises ConfigError where TLS is needed but not set.
        """
        channel = self._channels.get(address) or self._known.get(address)
        if channel is None:
            channel = _AuthorizedChannel(
                address, self._security, on_open=self._enter, clock=self._clock
            )
            self._known[address] = channel
        return channel

    def _enter(self, opened: _AuthorizedChannel) -> None:
        self._retire_idle()
        self._channels[opened.address] = opened

    def _retire_idle(self) -> None:
        oldest_s = self._clock() - IDLE_S
        for address, channel in list(self._channels.items()):
            if channel.called_s < oldest_s:
                channel.retire()
                if not channel.has_calls():
                    del self._channels[address]
        self._stubs = {key: one for key, one in self._stubs.items() if key[0] in self._channels}

    def stub(self, make: Callable[[grpc.aio.Channel], Stub], address: str) -> Stub:
        """Return the stub of class `make` on the channel to "host:port": one for all its calls,
        since a stub costs more to make than to call. Raises as `get`."""
        found = self._stubs.get((address, make))
        if found is None:
            found = self._stubs[address, make] = make(self.get(address))
        return cast(Stub, found)

    def renew(self) -> None:
        """Use the present certificate files in later calls."""
        for channel in self._channels.values():
            channel.renew()

    async def close(self) -> None:
        """Close all channels."""
        channels, self._channels = list(self._channels.values()), {}
        self._stubs.clear()
        for channel in channels:
            await channel.close()


def open_channel(address: str, security: Security) -> grpc.aio.Channel:
    """Open a channel; each call passes its own token. Raises ConfigError as `Channels.get`."""
    credentials = security.channel_credentials(address)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)


class _AuthorizedChannel(RenewableChannel):
    """A channel that adds a token to every call."""

    def __init__(
        self,
        address: str,
        security: Security,
        *,
        on_open: Callable[[_AuthorizedChannel], None],
        clock: Callable[[], float],
    ) -> None:
        """`on_open` is called now, and at the first call after `retire`."""
        super().__init__(lambda: open_channel(address, security))
        self.address = address
        self.called_s = clock()
        """Time of the last call."""
        self._security = security
        self._on_open = on_open
        self._clock = clock
        on_open(self)

    def inner(self) -> grpc.aio.Channel:
        """Return the inner channel; open it after `retire`."""
        is_retired = self._inner is None
        inner = super().inner()
        if is_retired:
            self._on_open(self)
        return inner

    def multicallable(self, kind: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the multicallable of the base class, which adds the token to each call."""
        security, audience = self._security, audience_of(method)
        call = super().multicallable(kind, method, *args, **kwargs)
        # A stream of requests may be kept for many callers: each request has its own context.
        traced = kind.startswith("unary")

        def invoke(request: Any = None, *, metadata: Any = None, **options: Any) -> Any:
            self.called_s = self._clock()
            pairs = tuple(metadata) if metadata is not None else ()
            if not any(key == "authorization" for key, _ in pairs):
                pairs += (("authorization", f"Bearer {security.token_for(audience)}"),)
            if traced and (traceparent := current_span().traceparent):
                pairs += ((HEADER, traceparent),)
            return call(request, metadata=pairs, **options)

        return invoke
