"""Request bodies in memory: counted as their bytes arrive, until the end of their requests.

A body is kept as long as its call, because only its new messages are decoded. Owns the limits of
all bodies and of one session's; the largest single body is aiohttp's `client_max_size`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from aiohttp import web
from aiohttp.compression_utils import HAS_BROTLI, HAS_ZSTD

from forge.core.errors import ResourceExhausted
from services.gateway.errors import UnsupportedEncoding
from services.gateway.metrics import BODY_BYTES, REFUSED

RETRY_AFTER_S = 1.0
READABLE_ENCODINGS = (
    "gzip",
    "deflate",
    *(("br",) if HAS_BROTLI else ()),
    *(("zstd",) if HAS_ZSTD else ()),
)
"""Values of Content-Encoding that aiohttp decodes on this host; it reads any other as it is."""


def check_encoding(request: web.Request) -> None:
    """Raises `UnsupportedEncoding` for a body that cannot be decoded."""
    encoding = request.headers.get("Content-Encoding", "")
    if encoding.strip().lower() not in ("", "identity", *READABLE_ENCODINGS):
        raise unsupported_encoding(f"unknown Content-Encoding {encoding[:40]!r}")


def unsupported_encoding(problem: str) -> UnsupportedEncoding:
    """Returns the error of an encoding, with those that are supported."""
    return UnsupportedEncoding(f"{problem} (supported: {', '.join(READABLE_ENCODINGS)})")


@dataclass(slots=True)
class HeldBody:
    """The body of one request, as far as it has arrived."""

    bodies: Bodies
    session: str
    size_bytes: int = 0

    def grow(self, more_bytes: int) -> None:
        """Raises `ResourceExhausted` above a limit."""
        self.bodies.add(self.session, more_bytes)
        self.size_bytes += more_bytes

    def release(self) -> None:
        """Ends the count."""
        self.bodies.remove(self.session, self.size_bytes)
        self.size_bytes = 0


_HELD = web.RequestKey("held_body", HeldBody)


def release_body(request: web.Request) -> None:
    """Ends the count of the body of an ended request."""
    if _HELD in request:
        request[_HELD].release()


class Bodies:
    """All bodies in the memory of this gateway."""

    def __init__(self, *, most_bytes: int, most_of_session_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._most_of_session_bytes = most_of_session_bytes
        self._bytes = 0
        self._by_session: Counter[str] = Counter()
        BODY_BYTES.set_function(lambda: self._bytes)

    async def read(self, request: web.Request, session: str) -> bytes:
        """Returns the body of a request, which counts until `release_body`.
        Raises `ResourceExhausted`, `HTTPRequestEntityTooLarge`."""
        held = request[_HELD] = HeldBody(self, session)
        body = bytearray()
        while part := await request.content.readany():
            held.grow(len(part))
            body += part
            if len(body) > request.client_max_size > 0:
                raise web.HTTPRequestEntityTooLarge(
                    max_size=request.client_max_size, actual_size=len(body)
                )
        return bytes(body)

    def add(self, session: str, more_bytes: int) -> None:
        """Counts bytes of a session. Raises `ResourceExhausted` above a limit."""
        if self._bytes + more_bytes > self._most_bytes:
            REFUSED.labels("bodies").inc()
            raise ResourceExhausted(
                f"requests in flight have {self._bytes} bytes; the maximum is {self._most_bytes}",
                retry_after_s=RETRY_AFTER_S,
            )
        of_session = self._by_session.get(session, 0)
        if of_session + more_bytes > self._most_of_session_bytes:
            REFUSED.labels("session_bodies").inc()
            raise ResourceExhausted(
                f"requests in flight of session {session} have {of_session} bytes; the maximum is "
                f"{self._most_of_session_bytes}",
                retry_after_s=RETRY_AFTER_S,
            )
        self._bytes += more_bytes
        self._by_session[session] += more_bytes

    def remove(self, session: str, size_bytes: int) -> None:
        """Ends the count of bytes."""
        self._bytes -= size_bytes
        self._by_session[session] -= size_bytes
        if not self._by_session[session]:
            del self._by_session[session]
