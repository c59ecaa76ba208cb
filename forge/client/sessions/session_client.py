"""The common part of the session clients: channel, token, construction."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from forge.client.sessions.access import Access
from forge.client.sessions.turns import SessionInfo
from forge.runtime.rpc.channel import CHANNEL_OPTIONS
from forge.v1 import gateway_pb2_grpc


class SessionClient:
    """A session before its first call."""

    grpc_library: ClassVar[Any]
    """`grpc.aio` or `grpc`: the library of its channel."""

    def __init__(
        self,
        channel: Any,
        token: str,
        *,
        grader_token: str = "",
        owns_rollout: bool = True,
        owns_channel: bool = False,
        timeout_s: float = 600.0,
        retry_for_s: float = 30.0,
        stub: gateway_pb2_grpc.GatewayServiceStub | None = None,
    ) -> None:
        """`channel` comes from `grpc_library`. `stub`: one on this channel, for many sessions.

        `annotate` and `close` send `grader_token` (`RolloutLease.grader_token`): for programs that
        grade their rollout themselves.
        """
        self.info: SessionInfo | None = None
        self._channel = channel
        self._stub: Any = stub or gateway_pb2_grpc.GatewayServiceStub(channel)
        self._metadata = _metadata(token)
        self._grading = _metadata(grader_token or token)
        self._owns_rollout = owns_rollout
        self._owns_channel = owns_channel
        self._timeout_s = timeout_s
        self._retry_for_s = retry_for_s
        self._closed = False

    @classmethod
    def connect(
        cls,
        address: str,
        token: str,
        *,
        tls_ca: str = "",
        tls_cert: str = "",
        tls_key: str = "",
        **options: Any,
    ) -> Self:
        """Return a session over a channel of its own.

        `tls_ca`, `tls_cert` and `tls_key` are PEM files as in `Access`; `options` are the
        constructor's. Raises `ConfigError` for a file that cannot be read.
        """
        access = Access(
            address=address, token=token, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key
        )
        return cls._reached(access, **options)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Return the session that a runner prepared for this process. Raises `ConfigError`."""
        return cls._reached(Access.from_env(environ), owns_rollout=False)

    @classmethod
    def _reached(cls, access: Access, **options: Any) -> Self:
        credentials = access.credentials()
        channel = (
            cls.grpc_library.secure_channel(access.address, credentials, options=CHANNEL_OPTIONS)
            if credentials
            else cls.grpc_library.insecure_channel(access.address, options=CHANNEL_OPTIONS)
        )
        return cls(channel, access.token, owns_channel=True, **options)


def _metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)
