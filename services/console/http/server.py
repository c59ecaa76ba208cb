"""The HTTP server: files of the page, its data, live events, login.

Owns the routes and the answers of errors. Every route of data names the right that it needs.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import msgspec
from aiohttp import web

from forge.core.errors import ConfigError, ForgeError, InvalidArgument, ResourceExhausted
from forge.runtime.rpc.bind_errors import bind_fault
from forge.runtime.telemetry import log
from services.console.config import ConsoleConfig
from services.console.data.compared_runs import ComparedRuns
from services.console.data.queue_view import QueueView
from services.console.data.tasks_view import TasksView
from services.console.data.trajectories.token_rows import MOST_TOKENS, token_rows
from services.console.data.trajectories.token_texts import TokenTexts
from services.console.data.trajectories.token_values import TokenValuesCache, value_rows
from services.console.data.trajectories.trajectory_cache import TrajectoryCache
from services.console.data.trajectories.trajectory_list import (
    TrajectoryList,
    filter_of,
    whole_number,
)
from services.console.data.trajectories.trajectory_page import trajectory_row
from services.console.http.access import (
    CONTENT,
    COOKIE,
    HEADERS,
    QUEUE,
    QUEUE_CHANGES,
    SUMMARIES,
    TRAINING,
    VALUES,
    AccessRules,
    Right,
)
from services.console.http.actions import Actions
from services.console.http.events import Viewers
from services.console.metrics import REQUESTS

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Read = Callable[[web.Request], Awaitable[Any]]
TOPIC_RIGHTS: Mapping[str, Right] = {
    "steps": TRAINING,
    "overview": QUEUE,
    "queue": QUEUE,
    "closes": SUMMARIES,
    "services": QUEUE,
    "weights": TRAINING,
    "tasks": QUEUE_CHANGES,
}
_TRAJECTORY = "{trajectory:[a-zA-Z0-9._:-]{1,240}}"
MAX_BODY_BYTES = 16 << 10
GZIP_BYTES = 2048
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSources:
    """Data sources of the routes."""

    viewers: Viewers
    queue: QueueView
    trajectories: TrajectoryList
    tasks: TasksView
    cache: TrajectoryCache
    texts: TokenTexts
    values: TokenValuesCache
    compared: ComparedRuns
    actions: Actions


class HttpServer:
    """Serves the console on one port."""

    def __init__(self, config: ConsoleConfig, access: AccessRules, sources: DataSources) -> None:
        self._config = config
        self._access = access
        self._sources = sources
        self._busy = 0
        self._files = static_files()
        self._runner = web.AppRunner(
            self.application(), handler_cancellation=True, shutdown_timeout=1.0
        )

    async def start(self, context: Any) -> int:
        """Listens, with TLS if `context` is one; returns the port. Raises `ConfigError` if the port
        is in use."""
        config = self._config
        await self._runner.setup()
        site = web.TCPSite(self._runner, config.host, config.http.port, ssl_context=context)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"http.port = {config.http.port}: {config.host}:{config.http.port} cannot be "
                f"bound: {bind_fault(error, '--http.port')}"
            ) from None
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        """Ends all connections."""
        await self._runner.cleanup()

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.on_response_prepare.append(_add_headers)
        add = app.router.add_get
        add("/", self._file)
        add("/healthz", self._healthz)
        add("/static/{path:[a-zA-Z0-9_./-]+}", self._file)
        add("/api/session", self._session)
        app.router.add_post("/api/login", self._login)
        app.router.add_post("/api/logout", self._logout)
        self._sources.actions.add_to(app, self._access, _json)
        add("/api/events", self._events)
        add("/api/compared", self._data(TRAINING, self._compared))
        add("/api/queue/{index:[0-9]{1,18}}", self._data(QUEUE, self._position))
        add("/api/trajectories", self._data(SUMMARIES, self._newest))
        add("/api/search", self._data(CONTENT, self._search))
        add("/api/data_set", self._data(QUEUE_CHANGES, self._data_set))
        add("/api/groups/{task:[a-zA-Z0-9._-]{1,200}}", self._data(SUMMARIES, self._group))
        add(f"/api/trajectories/{_TRAJECTORY}", self._data(CONTENT, self._trajectory))
        turn = f"/api/trajectories/{_TRAJECTORY}/turns/{{turn:[0-9]{{1,9}}}}"
        add(f"{turn}/tokens", self._data(CONTENT, self._tokens))
        add(f"{turn}/values", self._data(VALUES, self._values))
        return app

    def _data(self, right: Right, read: Read) -> Handler:
        """Returns a handler of data: right, limit of requests being handled, deadline, JSON."""

        async def handle(request: web.Request) -> web.StreamResponse:
            self._access.claims(request, right)
            if self._busy >= self._config.http.max_requests:
                raise ResourceExhausted(
                    f"{self._busy} requests are being handled (http.max_requests)",
                    retry_after_s=1.0,
                )
            self._busy += 1
            try:
                async with asyncio.timeout(self._config.fetch_timeout_s):
                    content = await read(request)
            finally:
                self._busy -= 1
            return await _json(request, content)

        return handle

    async def _compared(self, request: web.Request) -> Any:
        return await asyncio.to_thread(self._sources.compared.read)

    async def _position(self, request: web.Request) -> Any:
        return await self._sources.queue.group(int(request.match_info["index"]))

    async def _newest(self, request: web.Request) -> Any:
        return await self._sources.trajectories.newest(filter_of(request.query))

    async def _search(self, request: web.Request) -> Any:
        text = request.query.get("text", "").strip()
        if not text:
            raise InvalidArgument("text is empty: give a text to search for")
        return await self._sources.trajectories.search(
            filter_of(request.query), text, after=request.query.get("after", "")
        )

    async def _data_set(self, request: web.Request) -> Any:
        return await self._sources.tasks.data_set(request.query.get("tag", ""))

    async def _group(self, request: web.Request) -> Any:
        return await self._sources.trajectories.group(request.match_info["task"])

    async def _trajectory(self, request: web.Request) -> Any:
        trajectory_id = request.match_info["trajectory"]
        one = await self._sources.cache.get(trajectory_id)
        advantages = await self._sources.trajectories.advantages(trajectory_id)
        # On a thread: a long trajectory takes a second.
        return await asyncio.to_thread(trajectory_row, one, advantages)

    async def _tokens(self, request: web.Request) -> Any:
        one = await self._sources.cache.get(request.match_info["trajectory"])
        first, count = _range(request)
        read = partial(token_rows, first=first, count=count)
        turn = int(request.match_info["turn"])
        return await asyncio.to_thread(read, one, turn, self._sources.texts)

    async def _values(self, request: web.Request) -> Any:
        # Lengths of turns are the pool's.
        self._access.claims(request, CONTENT)
        trajectory_id = request.match_info["trajectory"]
        one = await self._sources.cache.get(trajectory_id)
        values, note = await self._sources.values.get(trajectory_id)
        first, count = _range(request)
        read = partial(value_rows, first=first, count=count)
        return await asyncio.to_thread(read, one, int(request.match_info["turn"]), values, note)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        names = [name for name in request.query.get("topics", "").split(",") if name]
        if not names or not {*names} <= TOPIC_RIGHTS.keys():
            raise InvalidArgument(f"topics must be among {', '.join(TOPIC_RIGHTS)}")

        def check() -> None:
            for name in names:
                self._access.claims(request, TOPIC_RIGHTS[name])

        check()
        return await self._sources.viewers.stream(request, names, check=check)

    async def _session(self, request: web.Request) -> web.StreamResponse:
        claims = self._access.reader(request)
        return await _json(
            request,
            {
                "login_needed": self._access.login_needed,
                "cluster": self._config.cluster,
                "subject": claims.subject if claims else "",
                "scopes": sorted(claims.scopes) if claims else [],
                "may_steer": self._access.may_steer(claims),
            },
        )

    async def _login(self, request: web.Request) -> web.StreamResponse:
        if request.content_type != "application/json":
            # No form of another site has this type.
            raise InvalidArgument("send the token as JSON")
        body = await request.read()
        try:
            token = msgspec.json.decode(body, type=dict[str, str])["token"].strip()
        except (msgspec.MsgspecError, KeyError):
            raise InvalidArgument('the body must be {"token": "..."}') from None
        claims = self._access.verify(token, QUEUE)
        response = await _json(request, {"subject": claims.subject})
        # A cookie of the browser's session; the token's own expiry ends it earlier.
        response.set_cookie(
            COOKIE,
            token,
            httponly=True,
            samesite="Strict",
            secure=self._access.secure,
            path="/",
        )
        return response

    async def _logout(self, request: web.Request) -> web.StreamResponse:
        response = await _json(request, {})
        response.del_cookie(COOKIE, path="/")
        return response

    async def _healthz(self, request: web.Request) -> web.StreamResponse:
        return await _json(request, {"status": "ok"})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info.get("path", "index.html")
        found = self._files.get(name)
        if found is None:
            raise web.HTTPNotFound
        content, kind = found
        # A browser asks again each time, so that no page mixes two releases.
        headers = {
            "Content-Type": kind,
            "Cache-Control": "no-cache",
            "ETag": f'"{hash(content):x}"',
        }
        if request.headers.get("If-None-Match") == headers["ETag"]:
            return web.Response(status=304, headers=headers)
        response = web.Response(body=content, headers=headers)
        response.enable_compression()
        return response

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Checks the host, and converts errors."""
        try:
            self._access.check_host(request)
            response = await handler(request)
        except web.HTTPException as error:
            response = _failed(error.status, error.reason)
        except ForgeError as error:
            response = _failed(error.http_status, str(error))
            if error.retry_after_s:
                response.headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
        except TimeoutError:
            response = _failed(504, "the services did not answer in time")
        except ConnectionError:
            raise
        except Exception:
            log.exception("request_failed", path=request.path)
            response = _failed(500, "internal error; the console's log has it")
        REQUESTS.labels(str(response.status)).inc()
        return response


def _range(request: web.Request) -> tuple[int, int]:
    """First token and number of tokens of a request. Raises `InvalidArgument`."""
    query = request.query
    return whole_number(query, "first", 0), whole_number(query, "count", MOST_TOKENS)


def static_files() -> dict[str, tuple[bytes, str]]:
    """Content and type of each file of the page, by its path."""
    root = files("services.console") / "static"
    found: dict[str, tuple[bytes, str]] = {}

    def add(folder: Traversable, path: str) -> None:
        for one in folder.iterdir():
            if one.is_dir():
                add(one, f"{path}{one.name}/")
            elif kind := _TYPES.get(f".{one.name.rpartition('.')[2]}"):
                found[f"{path}{one.name}"] = one.read_bytes(), kind

    add(root, "")
    return found


async def _json(request: web.Request, content: Any) -> web.Response:
    body = msgspec.json.encode(content)
    headers = {"Content-Type": "application/json", "Cache-Control": "no-store"}
    if len(body) > GZIP_BYTES and "gzip" in request.headers.get("Accept-Encoding", ""):
        body = await asyncio.to_thread(gzip.compress, body, 3)
        headers["Content-Encoding"] = "gzip"
    return web.Response(body=body, headers=headers)


def _failed(status: int, message: str) -> web.Response:
    body = msgspec.json.encode({"error": message})
    return web.Response(
        status=status,
        body=body,
        headers={"Content-Type": "application/json", "Cache-Control": "no-store"},
    )


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)
