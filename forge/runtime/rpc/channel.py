"""Channels to other processes: one per address, authenticated, kept alive.

The token is attached by wrapping the multicallables rather than by grpc interceptors, which cost
more than the call itself on the loopback interface.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from forge.runtime.security import Security

MAX_MESSAGE_BYTES = (4 << 20) + (64 << 10)
"""4 MiB of payload and room for the fields around it; what is bigger travels in chunks."""
MAX_REFUSED_BYTES = 4 * MAX_MESSAGE_BYTES
"""A message up to here is received, to be refused by name and counted; grpc drops bigger ones."""

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_REFUSED_BYTES),
    # A peer whose host vanished is noticed within 25 s even when nothing is sent.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted peer is reached again at once, not after grpc's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # The name misleads: it is how long one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Addresses come from discovery; a proxy of the environment has no part in it.
    ("grpc.enable_http_proxy", 0),
)


def blocking_channel(address: str, security: Security) -> grpc.Channel:
    """A channel to "host:port" for threads; each call brings a token. Raises ConfigError where TLS
    is needed but not set."""
    credentials = security.channel_credentials(address)
    if credentials is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)


class Channels:
    """All channels of one process, made on demand."""

    def __init__(self, security: Security) -> None:
        self._security = security
        self._channels: dict[str, grpc.aio.Channel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to "host:port"; its calls carry this process's service token unless they
        bring an `authorization` of their own. Raises ConfigError where TLS is needed but not set.
        """
        channel = self._channels.get(address)
        if channel is None:
            credentials = self._security.channel_credentials(address)
            inner = (
                grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
                if credentials is None
                else grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
            )
            channel = _AuthorizedChannel(inner, self._security)
            self._channels[address] = channel
        return channel

    async def close(self) -> None:
        """Close all channels."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()


class _AuthorizedChannel(grpc.aio.Channel):
    """A channel whose every call carries a token."""

    def __init__(self, inner: grpc.aio.Channel, security: Security) -> None:
        self._inner = inner
        self._security = security

    def _authorized(self, call: Callable[..., Any]) -> Any:
        security = self._security

        def invoke(request: Any = None, *, metadata: Any = None, **options: Any) -> Any:
            pairs = tuple(metadata) if metadata is not None else ()
            if not any(key == "authorization" for key, _ in pairs):
                pairs += (("authorization", f"Bearer {security.service_token()}"),)
            return call(request, metadata=pairs, **options)

        return invoke

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._authorized(self._inner.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._authorized(self._inner.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._authorized(self._inner.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._authorized(self._inner.stream_stream(*args, **kwargs))

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    async def __aenter__(self) -> _AuthorizedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
