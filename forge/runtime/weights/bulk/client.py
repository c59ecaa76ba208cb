"""Connections to the bulk ports of sources, and the sources at which they failed."""

from __future__ import annotations

import asyncio
import socket
import time

from forge.core.errors import ConfigError
from forge.runtime.security.tls import Tls
from forge.runtime.telemetry import log
from forge.runtime.weights.bulk.connection import (
    ACCEPTED,
    BulkConnection,
    BulkUnreachable,
)
from forge.v1.inference_pb2 import BulkOffer

AVOID_S = 600.0
"""Time for which a source is asked over gRPC after its bulk connection failed."""
CONNECT_S = 3.0
"""Longest time of a connection: a firewall may drop it silently."""


class BulkClient:
    """Opens connections, and remembers the sources that they failed at."""

    def __init__(self, security: Tls, *, enabled: bool) -> None:
        self._security = security
        self._enabled = enabled
        self._connect_s = CONNECT_S
        self._avoided_until_s: dict[str, float] = {}

    def wants(self, address: str) -> bool:
        """Whether to ask the source at `address` for an offer."""
        return self._enabled and self._avoided_until_s.get(address, 0.0) <= time.monotonic()

    def avoid(self, address: str, error: Exception) -> None:
        """Use gRPC alone at this source for `AVOID_S`."""
        log.warning("weight_bulk_failed", source=address, grpc_for_s=AVOID_S, error=str(error))
        now_s = time.monotonic()
        kept = {one: until_s for one, until_s in self._avoided_until_s.items() if until_s > now_s}
        self._avoided_until_s = {**kept, address: now_s + AVOID_S}

    async def connect(self, address: str, offer: BulkOffer, *, silence_s: float) -> BulkConnection:
        """Connect to the host of the source at `address`. Raises `BulkUnreachable`.

        Its reads fail after `silence_s` without data.
        """
        host = address.rpartition(":")[0].strip("[]")
        try:
            sock = await asyncio.to_thread(
                self._open, host, offer, timeout_s=min(self._connect_s, silence_s)
            )
        except (OSError, ConfigError) as error:
            raise BulkUnreachable(f"{host}:{offer.port} cannot be used: {error}") from None
        return BulkConnection(sock, silence_s=silence_s)

    def _open(self, host: str, offer: BulkOffer, *, timeout_s: float) -> socket.socket:
        context = self._security.client_context(host)
        sock = socket.create_connection((host, offer.port), timeout=timeout_s)
        try:
            if context is not None:
                sock = context.wrap_socket(sock, server_hostname=host)
            sock.sendall(offer.ticket)
            if sock.recv(len(ACCEPTED)) != ACCEPTED:
                raise ConnectionResetError("the ticket is refused")
        except OSError:
            sock.close()
            raise
        return sock
