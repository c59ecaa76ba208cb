"""Server interceptor: credentials, errors, metrics, access log and audit log of every call.

Wraps each method once, at its first call: a call takes about 0.35 ms, and the interceptor must not
add to it. Failed calls are logged at info. So are slow ones: over a second and over a tenth of the
caller's deadline, without the `wait_s` of a long poll. Other calls, and streams that succeed or are
cancelled, are logged at debug. Each line has the trajectory of the call, if there is one. A call
within a trace, or of a traced rollout's agent, has a span.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextvars import ContextVar
from math import inf
from types import TracebackType
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from forge.core.errors import ForgeError, InvalidArgument, PermissionDenied, Unauthenticated
from forge.runtime.rpc.channel import MAX_MESSAGE_BYTES
from forge.runtime.rpc.status import from_rpc_error, to_status, trailing_metadata
from forge.runtime.security.audit import REFUSED, write_audit
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import ANONYMOUS, Claims, audience_of
from forge.runtime.telemetry import bind_context, counter, gauge, histogram, log
from forge.runtime.tracing import (
    NO_SPAN,
    Span,
    SpanRole,
    enter_span,
    is_tracing,
    rollout_parent,
    start_span,
)
from forge.runtime.tracing.traceparent import HEADER

_CALLS = counter("forge_rpc_calls_total", "Calls served, by method and code.", ["method", "code"])
_SECONDS = histogram(
    "forge_rpc_call_seconds", "Time from arrival to answer, by method.", ["method"]
)
_IN_FLIGHT = gauge("forge_rpc_in_flight", "Calls being served, by method.", ["method"])

_SLOW_S = 1.0
_SLOW_SHARE = 0.1
"""Part of the caller's deadline."""
_claims: ContextVar[Claims] = ContextVar("forge_claims", default=ANONYMOUS)


def current_claims() -> Claims:
    """Return the caller's claims; ANONYMOUS on an open method."""
    return _claims.get()


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server."""

    def __init__(self, security: Security) -> None:
        self._security = security
        self._scopes: dict[str, str | Mapping[str, str]] = {}
        self._audited: dict[str, Collection[str]] = {}
        self._wrapped: dict[str, Any] = {}

    def require(
        self, full_name: str, scopes: str | Mapping[str, str], audited: Collection[str]
    ) -> None:
        """Set the scopes of a service, for all methods or by method name, and its audited ones."""
        self._scopes[full_name] = scopes
        self._audited[full_name] = audited

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the wrapped handler of a method."""
        path = handler_call_details.method
        handler = self._wrapped.get(path)
        if handler is None:
            handler = await continuation(handler_call_details)
            service, _, method = path.removeprefix("/").partition("/")
            # Health and reflection are not in `_scopes` and stay open.
            if handler is not None and service in self._scopes:
                scopes = self._scopes[service]
                scope = scopes if isinstance(scopes, str) else scopes.get(method, "service")
                streams = handler.request_streaming or handler.response_streaming
                audited = method in self._audited[service]
                method_served = _Method(
                    path, scope, self._security, streams=streams, audited=audited
                )
                # A stream of requests has callers of many traces, and may last for days.
                method_served.traced = not handler.request_streaming
                handler = _wrap(handler, method_served)
                self._wrapped[path] = handler
        return handler


class _Method:
    """Path, scope and metrics of one method."""

    def __init__(
        self, path: str, scope: str, security: Security, *, streams: bool, audited: bool
    ) -> None:
        self.path = path
        self.scope = scope
        self.audited = audited
        self.audience = audience_of(path)
        self.security = security
        self.seconds = _SECONDS.labels(path)
        self.in_flight = _IN_FLIGHT.labels(path)
        self.streams = streams
        self.ok = _CALLS.labels(path, "OK")
        self.traced = False
        """Whether a call of the method is part of its caller's trace."""

    def claims_of(self, context: Any) -> Claims:
        """Raises Unauthenticated."""
        for key, value in context.invocation_metadata():
            if key == "authorization":
                kind, _, token = value.partition(" ")
                if kind.lower() != "bearer":
                    raise Unauthenticated("authorization must be: Bearer <token>")
                return self.security.verify(token, self.audience)
        if self.scope:
            raise Unauthenticated("this call needs a token: authorization: Bearer <token>")
        return ANONYMOUS

    def check_scope(self, claims: Claims) -> None:
        """Raises PermissionDenied."""
        if not claims.allows(self.scope):
            raise PermissionDenied(
                f"{self.path} needs scope {self.scope}; the token of {claims.subject} "
                f"has {', '.join(sorted(claims.scopes)) or 'none'}"
            )


def _wrap(handler: Any, method: _Method) -> Any:
    """Return the handler with a `_Call` around each call."""
    kind = ("stream" if handler.request_streaming else "unary") + (
        "_stream" if handler.response_streaming else "_unary"
    )
    inner = getattr(handler, kind)
    # Where a coroutine writes the responses itself, gRPC encodes them.
    writes = handler.response_streaming and not inspect.isasyncgenfunction(inner)
    encode = _as_it_is if writes else _encoder(handler.response_serializer)

    async def answer(request: Any, context: Any) -> Any:
        async with _Call(method, context) as call:
            call.authorize(request)
            call.read(request)
            return encode(await inner(request, context))

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        async with _Call(method, context) as call:
            call.authorize(request)
            call.read(request)
            async for response in inner(request, context):
                yield encode(response)

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(
        stream if inspect.isasyncgenfunction(inner) else answer,
        request_deserializer=_decoder(
            handler.request_deserializer, streaming=handler.request_streaming
        ),
        response_serializer=handler.response_serializer if writes else None,
    )


def _decoder(decode: Callable[[bytes], Any] | None, *, streaming: bool) -> Callable[[bytes], Any]:
    """Wrap `decode`: its error reaches the handler of a stream, or `_Call.read`. An exception
    before the handler would end as UNKNOWN and not be counted."""

    def decoded(data: bytes) -> Any:
        if len(data) > MAX_MESSAGE_BYTES:
            refusal = InvalidArgument(
                f"a request of {len(data)} bytes: one message holds {MAX_MESSAGE_BYTES}"
            )
        else:
            try:
                return data if decode is None else decode(data)
            except DecodeError as error:
                refusal = InvalidArgument(f"the request cannot be read: {error}")
        if streaming:
            raise refusal
        return refusal

    return decoded


def _as_it_is(response: Any) -> Any:
    return response


def _encoder(encode: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
    """Wrap `encode`: refuse responses that gRPC would drop after the call was counted as OK."""

    def encoded(response: Any) -> bytes:
        data: bytes = response if encode is None else encode(response)
        if len(data) > MAX_MESSAGE_BYTES:
            raise InvalidArgument(
                f"an answer of {len(data)} bytes: one message holds {MAX_MESSAGE_BYTES}; "
                "request less at a time"
            )
        return data

    return encoded


@functools.cache
def _trajectory_field(descriptor: Any) -> str:
    """Return the field with the trajectory of a request, or ""; None: the request is no message."""
    fields = () if descriptor is None else descriptor.fields_by_name
    return next((name for name in ("trajectory_id", "session_id") if name in fields), "")


class _Call:
    """One call, from arrival to answer."""

    __slots__ = ("_claims", "_context", "_method", "_request", "_slow_s", "_span", "_started_s")

    def __init__(self, method: _Method, context: Any) -> None:
        self._method = method
        self._context = context
        self._claims = ANONYMOUS
        self._request: Any = None
        self._started_s = time.perf_counter()
        self._slow_s = inf if method.streams else _SLOW_S
        self._span: Span = NO_SPAN

    def authorize(self, request: Any) -> None:
        self._request = request
        self._claims = self._method.claims_of(self._context)
        _claims.set(self._claims)
        if self._claims.trajectory_id:
            bind_context(trajectory_id=self._claims.trajectory_id)
        if is_tracing() and self._method.traced:
            self._span = _start_span(self._method.path, self._context, self._claims)
        self._method.check_scope(self._claims)

    def read(self, request: Any) -> None:
        """Take from the request what its log line needs. Raises InvalidArgument, see `_decoder`."""
        if isinstance(request, InvalidArgument):
            raise request
        field = _trajectory_field(getattr(request, "DESCRIPTOR", None))
        if field and (trajectory_id := getattr(request, field)):
            bind_context(trajectory_id=trajectory_id)
        left_s = self._context.time_remaining()
        wait_s = getattr(request, "wait_s", 0.0)
        self._slow_s = wait_s + max(self._slow_s, _SLOW_SHARE * ((left_s or 0.0) - wait_s))

    async def __aenter__(self) -> _Call:
        self._method.in_flight.inc()
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, grpc.aio.AioRpcError):
            # A nested call failed: pass its status on.
            error = from_rpc_error(error)
        self._record(error)
        if error is None or not isinstance(error, Exception):
            return
        if isinstance(error, grpc.aio.AbortError):
            return
        code, details = to_status(error)
        await self._context.abort(code, details, trailing_metadata(error))

    def _record(self, error: BaseException | None) -> None:
        method, elapsed_s = self._method, time.perf_counter() - self._started_s
        method.in_flight.dec()
        method.seconds.observe(elapsed_s)
        code = "OK" if error is None else self._code(error)
        if self._span is not NO_SPAN:
            _end_span(self._span, code, error)
        if code == REFUSED or (method.audited and "session" not in self._claims.scopes):
            self._audit(code, error)
        if error is None:
            method.ok.inc()
            write = log.debug if elapsed_s < self._slow_s else log.info
            write("rpc", method=method.path, code="OK", s=elapsed_s, subject=self._claims.subject)
            return
        _CALLS.labels(method.path, code).inc()
        broken = isinstance(error, Exception) and code in ("INTERNAL", "DATA_LOSS")
        left = method.streams and code == "CANCELLED"
        (log.error if broken else log.debug if left else log.info)(
            "rpc",
            method=method.path,
            code=code,
            s=elapsed_s,
            subject=self._claims.subject,
            error=str(error),
            exc_info=error if broken else None,
        )

    def _audit(self, code: str, error: BaseException | None) -> None:
        peer = self._context.peer()
        name = self._method.path.rpartition(".")[2]
        request = self._request
        write_audit(name, self._claims, peer=peer, code=code, error=error, request=request)

    def _code(self, error: BaseException) -> str:
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            return "CANCELLED"
        if isinstance(error, grpc.aio.AbortError):
            code = self._context.code()
            return code.name if isinstance(code, grpc.StatusCode) else "UNKNOWN"
        if isinstance(error, ForgeError):
            return error.code
        return "INTERNAL"


def _start_span(path: str, context: Any, claims: Claims) -> Span:
    """Below the caller's span; an agent without one is below the root of its rollout."""
    parent = next((str(v) for k, v in context.invocation_metadata() if k == HEADER), "")
    links: tuple[str, ...] = ()
    if claims.trajectory_id:
        root = rollout_parent(claims.trajectory_id)
        parent, links = (parent, (root,)) if parent else (root, ())
    service, _, method = path.removeprefix("/").partition("/")
    span = start_span(
        path.removeprefix("/"),
        kind=SpanRole.SERVER,
        parent=parent,
        attributes={"rpc.system.name": "grpc", "rpc.method": f"{service}/{method}"},
        links=links,
    )
    enter_span(span)
    return span


def _end_span(span: Span, code: str, error: BaseException | None) -> None:
    span.set({"rpc.response.status_code": code})
    # A caller that leaves is no fault of this process.
    if error is not None and code != "CANCELLED":
        span.fail(error)
    span.end()
