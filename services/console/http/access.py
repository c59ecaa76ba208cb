"""Access to pages and actions: host names, tokens, and the headers of every answer.

A reader needs the token and scope that the RPC behind a page needs, so the console opens nothing.
Without login the console is for the users of its own host alone: it accepts only requests that name
it as a loopback host, so that no page of another site reads it through a renamed address (DNS
rebinding). Without login all changes are refused, unless `http.steering` allows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from aiohttp import web

from forge.core.errors import InvalidArgument, PermissionDenied, Unauthenticated
from forge.runtime.security.audit import write_audit
from forge.runtime.security.credentials import Security
from forge.runtime.security.tls import is_loopback
from forge.runtime.security.tokens import Claims
from services.console.config import ConsoleConfig

COOKIE = "forge_console"
NO_LOGIN = "without login"
"""Subject of changes on loopback that `http.steering` allows."""
HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            # No text becomes HTML, by whatever mistake in a script.
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
"""Headers of every answer."""


@dataclass(frozen=True, slots=True)
class Right:
    """Right for a page: a scope at the proto service behind it."""

    service: str
    scope: str


TRAINING = Right("TrainerService", "viewer")
QUEUE = Right("SchedulerService", "viewer")
SUMMARIES = Right("PoolService", "operator")
CONTENT = Right("PoolService", "admin")
VALUES = Right("TrainerService", "admin")
WEIGHTS = Right("TrainerService", "operator")
QUEUE_CHANGES = Right("SchedulerService", "operator")
"""Also the list of groups, whose trajectories have rewards."""
DRAIN = Right("DrainService", "operator")


class WrongHost(PermissionDenied):
    """The request names a host that is not this console."""

    http_status = 421


def needs_login(config: ConsoleConfig) -> bool:
    """Whether readers need a token."""
    on_loopback = is_loopback(config.host) and not config.http.hosts
    return config.http.login == "always" or not on_loopback


class AccessRules:
    """The rules of one console."""

    def __init__(self, config: ConsoleConfig, security: Security) -> None:
        self.login_needed = needs_login(config)
        self._steering = config.http.steering
        self._security = security
        own = (config.host, config.advertise_host)
        self._names = {name.lower() for name in (*own, *config.http.hosts) if name}
        self.secure = security.http_context(config.host) is not None

    def check_host(self, request: web.Request) -> None:
        """Raises `WrongHost` for another host, and for a page of another site."""
        self._check_name(request.host, "Host")
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc.lower() != request.host.lower():
            raise WrongHost(f"Origin {origin[:100]!r} is not this console")
        other_site = request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        # Links from other sites lead to the start page, which has no data.
        if other_site and request.path.startswith("/api/"):
            raise WrongHost("a page of another site may not read the console")

    def _check_name(self, host: str, header: str) -> None:
        name = host.lower()
        plain = urlsplit(f"//{name}").hostname or ""
        if name in self._names or plain in self._names or is_loopback(plain):
            return
        raise WrongHost(
            f"{header} {host[:100]!r} is not a name of this console: open it by its address, or "
            "add the name to http.hosts"
        )

    def claims(self, request: web.Request, right: Right) -> Claims | None:
        """The claims of the reader; None where no login is needed. Raises `Unauthenticated` or
        `PermissionDenied`."""
        if not self.login_needed:
            return None
        claims = self.verify(self._token(request), right)
        if not claims.allows(right.scope):
            error = f"the token of {claims.subject} has no scope {right.scope}"
            write_audit(
                f"{request.method} {request.path}",
                claims,
                peer=request.remote or "",
                code="PERMISSION_DENIED",
                error=error,
            )
            raise PermissionDenied(error)
        return claims

    def actor(self, request: web.Request, right: Right) -> Claims:
        """The claims of a person who changes something. Raises `Unauthenticated` or
        `PermissionDenied`, and `InvalidArgument` for a body that a form of another site could
        send."""
        if request.content_type != "application/json":
            raise InvalidArgument("the body must be JSON")
        claims = self.claims(request, right)
        if claims is not None:
            return claims
        if not self._steering:
            raise PermissionDenied(
                "without login this console only reads: set http.steering = true to let every "
                'user of this host change things, or http.login = "always" to log in'
            )
        return Claims(subject=NO_LOGIN, scopes=frozenset())

    def may_steer(self, reader: Claims | None) -> bool:
        """Whether to offer changes to a reader."""
        if not self.login_needed:
            return self._steering
        return reader is not None and reader.allows("operator")

    def verify(self, token: str, right: Right) -> Claims:
        """The claims of a token. Raises `Unauthenticated`."""
        return self._security.verify(token, right.service)

    def reader(self, request: web.Request) -> Claims | None:
        """The claims of the login, if there is a valid one."""
        try:
            return self.verify(self._token(request), QUEUE)
        except Unauthenticated:
            return None

    def _token(self, request: web.Request) -> str:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        token = token.strip() if kind.lower() == "bearer" else request.cookies.get(COOKIE, "")
        if not token:
            raise Unauthenticated("log in with a token of `forge token issue`")
        return token
