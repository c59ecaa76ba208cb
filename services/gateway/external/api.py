"""One external API: calls with the operator's key, bounded in number, time and size.

Owns the HTTP client, the key and the meaning of the API's statuses. The key is sent to the API and
nowhere else: errors and logs name the model, and the API's own texts are passed on without the key.
Owns no protocol: bodies pass as they are but for the model's name.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from forge.core.errors import (
    ConfigError,
    ForgeError,
    ResourceExhausted,
    Unavailable,
)
from forge.runtime.telemetry import log
from services.gateway.errors import ApiRefused, ApiRejected, InvalidField
from services.gateway.external.key_file import read_key
from services.gateway.metrics import OTHER_FAILURES
from services.gateway.named_models import NamedModel

PASSED_HEADERS = ("anthropic-version", "anthropic-beta", "openai-beta")
"""Headers of agents that belong to a protocol; all others stay here."""
ANTHROPIC_VERSION = "2023-06-01"
MAX_ERROR_BYTES = 64 << 10
CONNECT_TIMEOUT_S = 30.0
_PATHS = {
    "openai": {
        "/v1/chat/completions": "/chat/completions",
        "/v1/completions": "/completions",
        "/v1/responses": "/responses",
        "/v1/embeddings": "/embeddings",
    },
    "anthropic": {
        "/v1/messages": "/v1/messages",
        "/v1/messages/count_tokens": "/v1/messages/count_tokens",
    },
    "gemini": {
        f"/v1beta/models/MODEL:{method}": f"/v1beta/models/MODEL:{method}"
        for method in ("generateContent", "streamGenerateContent", "countTokens")
    },
}
"""Paths of the gateway and at the base URL, as the clients of each protocol add them; MODEL stands
for the name of the model."""
_EVENTS = {"alt": "sse"}
_KEY_HEADERS = {
    "openai": ("Authorization", "Bearer "),
    "anthropic": ("x-api-key", ""),
    "gemini": ("x-goog-api-key", ""),
}
"""Header of the key by protocol, and the text before the key."""
_PASSED_STATUSES = frozenset({400, 404, 409, 413, 422})
"""The agent's own errors: the answer of the API has the reason."""


class ExternalApi:
    """The API of one model."""

    def __init__(self, name: str, settings: NamedModel) -> None:
        self.name = name
        self.kind = settings.kind
        self.protocol = settings.protocol
        self.timeout_s = settings.timeout_s
        self.max_response_bytes = int(settings.max_response_mib * (1 << 20))
        self.recorded_bytes = settings.recorded_kib << 10
        self._settings = settings
        self._calls = 0
        self._client: aiohttp.ClientSession | None = None
        self._key()  # A wrong file is an error at the start, not of the first call.

    async def close(self) -> None:
        """Closes the connections."""
        if self._client is not None:
            await self._client.close()

    def target(self, path: str) -> str:
        """Returns the URL for a path of the gateway. Raises `InvalidArgument` for a path that this
        model does not have."""
        paths = self._paths()
        if path not in paths:
            raise self.refusal()
        at = paths[path].replace("MODEL", quote(self._upstream, safe=""))
        return self._settings.url.rstrip("/") + at

    def refusal(self) -> InvalidField:
        """Returns the error of a call over another protocol, with the ways that reach the API."""
        ways = " or ".join(path.replace("MODEL", self.name) for path in self._paths())
        if "/v1/responses" in self._paths():
            ways += ", and by a WebSocket at /v1/responses"
        return InvalidField(
            f"model {self.name!r} is an external API of kind {self.kind}: it is called by "
            f"POST {ways}",
            param="model",
        )

    def _paths(self) -> Mapping[str, str]:
        if self.kind == "embeddings":
            return {"/v1/embeddings": "/embeddings"}
        return _PATHS[self.protocol]

    @property
    def _upstream(self) -> str:
        return self._settings.upstream or self.name

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Counts one call for the length of a block. Raises `ResourceExhausted`."""
        if self._calls >= self._settings.max_calls:
            OTHER_FAILURES.labels(self.name, "busy").inc()
            raise ResourceExhausted(
                f"model {self.name!r} has {self._calls} calls in flight, its maximum",
                retry_after_s=1.0,
            )
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    @asynccontextmanager
    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str], *, events: bool = False
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Sends a request; yields the response, if its status is one of success. `events`: in
        Gemini's API, a stream has server-sent events.

        Raises `ApiRejected` with the API's own answer to a wrong request, `ResourceExhausted` for a
        rate limit, `ApiRefused` for a refused key or a redirect, `Unavailable` otherwise.
        """
        url, gemini = self.target(path), self.protocol == "gemini"
        # In Gemini's API the name is in the path.
        content = body if gemini else with_name(body, self._upstream)
        try:
            key = self._key()
        except ConfigError as error:
            # Its text has a path of this host.
            log.error("external_key_unreadable", model=self.name, error=str(error))
            OTHER_FAILURES.labels(self.name, "refused_key").inc()
            raise ApiRefused(
                f"model {self.name!r}: the operator's key cannot be read; tell the operator"
            ) from None
        request = self._open().post(
            url,
            params=_EVENTS if events and gemini else None,
            data=content,
            headers=self._headers(headers, key),
            allow_redirects=False,
        )
        try:
            async with request as response:
                if not 200 <= response.status < 300:
                    raise await self._error(response, key)
                yield response
        except aiohttp.ClientPayloadError:
            OTHER_FAILURES.labels(self.name, "cut").inc()
            raise Unavailable(f"model {self.name!r}: its API ended in mid-answer") from None
        except aiohttp.ClientError as error:
            # Its text has addresses of the operator's network.
            log.warning("external_unreachable", model=self.name, error=str(error))
            OTHER_FAILURES.labels(self.name, "unreachable").inc()
            raise Unavailable(f"model {self.name!r}: its API cannot be reached") from None

    async def pieces(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """Yields the content of a response as it comes. Raises `ApiRefused` for more than
        `max_response_mib`."""
        received = 0
        async for piece in response.content.iter_any():
            received += len(piece)
            if received > self.max_response_bytes:
                OTHER_FAILURES.labels(self.name, "too_large").inc()
                raise ApiRefused(
                    f"model {self.name!r}: its API answers with more than max_response_mib = "
                    f"{self._settings.max_response_mib:g}"
                )
            yield piece

    def _key(self) -> str:
        return read_key(f"models.{self.name}", self._settings.key_file)

    def _open(self) -> aiohttp.ClientSession:
        if self._client is None:
            self._client = aiohttp.ClientSession(
                # The caller has the deadline of the whole call.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                connector=aiohttp.TCPConnector(limit=self._settings.max_calls),
                # Cookies of one session must not reach another one.
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._client

    def _headers(self, given: Mapping[str, str], key: str) -> dict[str, str]:
        headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            "User-Agent": "forge-gateway",
        }
        headers |= {name: given[name] for name in PASSED_HEADERS if name in given}
        if self.protocol == "anthropic":
            headers.setdefault("anthropic-version", ANTHROPIC_VERSION)
        if key:
            name, before = _KEY_HEADERS[self.protocol]
            headers[name] = before + key
        return headers

    async def _error(self, response: aiohttp.ClientResponse, key: str) -> ForgeError:
        status, api = response.status, f"model {self.name!r}: its API"
        if status in (401, 403):
            log.error("external_key_refused", model=self.name, status=status)
            OTHER_FAILURES.labels(self.name, "refused_key").inc()
            return ApiRefused(f"{api} refuses the operator's key ({status}); tell the operator")
        if status == 429:
            OTHER_FAILURES.labels(self.name, "rate_limit").inc()
            return ResourceExhausted(
                f"{api} limits the rate of calls", retry_after_s=_retry_after_s(response.headers)
            )
        if status in _PASSED_STATUSES:
            OTHER_FAILURES.labels(self.name, "refused").inc()
            text = await _text(response)
            return ApiRejected(
                f"{api} refuses the request ({status})",
                status=status,
                body=text.replace(key, "***") if key else text,
            )
        log.warning("external_failed", model=self.name, status=status)
        OTHER_FAILURES.labels(self.name, "failed").inc()
        if status < 500:
            return ApiRefused(f"{api} answers with status {status}")
        return Unavailable(
            f"{api} answers with status {status}", retry_after_s=_retry_after_s(response.headers)
        )


def with_name(body: bytes, name: str) -> bytes:
    """Returns a JSON object with another `model`; all else stays as it is written."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields["model"] = msgspec.Raw(msgspec.json.encode(name))
    return msgspec.json.encode(fields)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    try:
        seconds = float(headers.get("Retry-After", ""))
    except ValueError:
        return None
    return min(max(0.0, seconds), 3600.0) if seconds == seconds else None


async def _text(response: aiohttp.ClientResponse) -> str:
    """Returns the beginning of an error's body, as JSON; "" for another form."""
    content = await response.content.read(MAX_ERROR_BYTES)
    try:
        body: Any = json.loads(content)
    except (ValueError, RecursionError):
        return ""
    return json.dumps(body) if isinstance(body, dict) else ""
