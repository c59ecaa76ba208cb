"""The HTTP server of the console: who reads what, headers, live events."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest

from forge.core.errors import InvalidArgument
from forge.v1 import trainer_pb2
from services.console.config import ConsoleConfig, HttpSettings
from services.console.http.access import needs_login
from services.console.http.server import TOPIC_RIGHTS, static_files
from tests.support.console.page import Console, served, token_of
from tests.support.pool.records import make_turn
from tests.support.runtime.waiting import until

WITH_LOGIN = ConsoleConfig(http=HttpSettings(login="always"))
STATIC = Path(__file__).parents[4] / "services" / "console" / "static"


@pytest.mark.parametrize(
    ("host", "hosts", "login", "needed"),
    [
        ("127.0.0.1", (), "auto", False),
        ("::1", (), "auto", False),
        ("127.0.0.1", (), "always", True),
        # A proxy leads others to loopback.
        ("127.0.0.1", ("forge.example.org",), "auto", True),
        ("10.0.0.1", (), "auto", True),
    ],
)
def test_login_is_needed_beyond_the_own_host(
    host: str, hosts: tuple[str, ...], login: str, needed: bool
) -> None:
    """`auto` leaves out the login for a reader on the same host alone."""
    config = ConsoleConfig(host=host, http=HttpSettings(hosts=hosts, login=login))  # type: ignore[arg-type]
    assert needs_login(config) == needed


def test_host_with_a_path_is_refused() -> None:
    """It would never match."""
    with pytest.raises(InvalidArgument, match=r"http\.hosts: 'https://forge'"):
        ConsoleConfig(http=HttpSettings(hosts=("https://forge",))).validate()


async def test_page_and_files_have_strict_headers() -> None:
    """No script but the page's own runs, no text becomes HTML, no other site frames it."""
    async with served() as console:
        for path in (
            "/",
            "/static/js/main.js",
            "/static/nothing.js",
            "/api/session",
            "/api/queue/9",
        ):
            async with console.client.get(path) as response:
                policy = response.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy and "unsafe" not in policy
                assert "require-trusted-types-for 'script'" in policy
                assert "frame-ancestors 'none'" in policy
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert response.headers["Referrer-Policy"] == "no-referrer"
        async with console.client.get("/static/js/main.js") as response:
            tag = response.headers["ETag"]
        async with console.client.get("/static/js/main.js", headers={"If-None-Match": tag}) as same:
            assert same.status == 304


def test_page_has_no_inline_code_and_no_html_from_texts() -> None:
    """A model writes the texts. Vendored code follows the same rule."""
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=|javascript:|//cdn", page)
    for script in STATIC.rglob("*.js"):
        unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
        assert not re.search(unsafe, script.read_text()), script
        assert not re.search(
            r"https?://(?!www\.w3\.org)", re.sub(r"//.*|/\*.*?\*/", "", script.read_text())
        ), script


def test_vendored_code_has_its_licence() -> None:
    """And no file of the page is large."""
    assert "MIT License" in (STATIC / "vendor" / "uplot" / "LICENSE").read_text()
    assert {
        "index.html",
        "app.css",
        "js/main.js",
        "vendor/uplot/uPlot.esm.js",
    } <= static_files().keys()
    assert all(len(content) < 200_000 for content, _ in static_files().values())


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7800", "127.0.0.1.evil.example", ""]
)
async def test_another_host_name_is_refused(host: str) -> None:
    """DNS rebinding: a page of evil.example whose name leads to 127.0.0.1 sends its own name."""
    async with served() as console:
        status, body = await console.get("/api/queue/3", Host=host)
        assert status in (400, 421) and "task_id" not in body
        assert (await console.get("/api/queue/3", Host="localhost:9"))[0] == 200


async def test_page_of_another_site_is_refused() -> None:
    """Also one of another port of this host; a link leads to the start page alone."""
    async with served() as console:
        own = {"Host": "localhost", "Origin": "http://localhost"}
        assert (await console.get("/api/queue/3", **own))[0] == 200
        for other in (
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Host": "localhost", "Origin": "http://localhost:8000"},
            {"Sec_Fetch_Site": "cross-site"},
            {"Sec_Fetch_Site": "same-site"},
        ):
            assert (await console.get("/api/queue/3", **other))[0] == 421, other
        async with console.client.get("/", headers={"Sec-Fetch-Site": "cross-site"}) as response:
            assert response.status == 200


async def test_data_needs_a_login_beyond_loopback() -> None:
    """The page itself has no data. A token works as a cookie and as a header."""
    async with served(WITH_LOGIN) as console:
        for path in ("/api/queue/3", "/api/events?topics=queue", "/api/events?topics=steps"):
            assert (await console.get(path))[0] == 401, path
        session = (await console.get("/api/session"))[1]
        assert session["login_needed"] and not session["subject"]
        token = token_of("viewer")
        assert (await console.get("/api/queue/3", Authorization=f"Bearer {token}"))[0] == 200
        async with console.client.post("/api/login", json={"token": token}) as response:
            assert response.status == 200
            cookie = response.headers["Set-Cookie"]
            assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert (await console.get("/api/queue/3"))[0] == 200
        assert (await console.get("/api/session"))[1]["subject"] == "ada-viewer"
        async with console.client.post("/api/logout") as response:
            assert response.status == 200
        assert (await console.get("/api/queue/3"))[0] == 401


@pytest.mark.parametrize(
    "token",
    [
        "",
        "v1.garbage.garbage",
        token_of("viewer", life_s=-1000.0),
        token_of("viewer", audience=("GatewayService",)),
        token_of("revoked"),
    ],
)
async def test_wrong_tokens_do_not_log_in(token: str) -> None:
    """Forged, expired, revoked, or of another audience."""
    async with served(WITH_LOGIN) as console:
        console.security.revoked = {"revoked": 1e12}
        async with console.client.post("/api/login", json={"token": token}) as response:
            assert response.status == 401
            assert "Set-Cookie" not in response.headers


async def test_token_without_the_scope_is_denied() -> None:
    """A runner's token reads nothing here."""
    async with served(WITH_LOGIN) as console:
        token = f"Bearer {token_of('runner')}"
        assert (await console.get("/api/queue/3", Authorization=token))[0] == 403


async def test_login_takes_json_alone() -> None:
    """A form of another site cannot send it."""
    async with served(WITH_LOGIN) as console:
        async with console.client.post("/api/login", data={"token": "x"}) as response:
            assert response.status == 400
        async with console.client.post("/api/login", json=["x"]) as response:
            assert response.status == 400
        async with console.client.post("/api/login", data=b"x" * 100_000) as response:
            assert response.status in (400, 413)


async def test_live_page_gets_states_and_new_steps() -> None:
    """Each topic at once, then its changes."""
    async with served() as console:
        await console.operator.steps.put(trainer_pb2.StepMetrics(step=1))
        async with console.client.get("/api/events?topics=queue,steps") as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            seen: dict[str, int] = {}
            async for name, event in console.events(response):
                if name == "queue":
                    assert event["state"]["phases"] == "tr"
                elif event["rows"]:
                    seen[name] = event["rows"][-1][0]
                    if seen[name] == 1:
                        await console.operator.steps.put(trainer_pb2.StepMetrics(step=2))
                if seen.get("steps") == 2 and "queue" in seen:
                    break
                seen.setdefault(name, 0)


async def test_live_pages_are_limited() -> None:
    """One more gets 429; a page that leaves makes room, and without any the reads end."""
    config = replace(ConsoleConfig(), http=HttpSettings(max_viewers=1))
    async with served(config) as console:
        async with console.client.get("/api/events?topics=queue") as response:
            await anext(console.events(response))
            status, body = await console.get("/api/events?topics=queue")
            assert status == 429 and "http.max_viewers" in body["error"]
        await until(lambda: not console.topics["queue"].watched.is_set())
        async with console.client.get("/api/events?topics=queue") as response:
            assert response.status == 200


async def test_live_page_ends_when_its_token_is_revoked() -> None:
    """Its browser connects again, and is refused."""
    async with served(WITH_LOGIN) as console:
        headers = {"Authorization": f"Bearer {token_of('viewer')}"}
        async with console.client.get("/api/events?topics=queue", headers=headers) as response:
            events = console.events(response)
            await anext(events)
            console.security.revoked = {"viewer": 1e12}
            async with asyncio.timeout(60):
                async for _ in events:
                    pass
            assert response.content.at_eof()


@pytest.mark.parametrize("query", ["", "?topics=", "?topics=nothing", "?topics=queue,nothing"])
async def test_unknown_topics_are_refused(query: str) -> None:
    """With 400."""
    async with served() as console:
        assert (await console.get(f"/api/events{query}"))[0] == 400


async def test_position_without_a_group_is_not_found() -> None:
    """The message says why; a malformed one is no route."""
    async with served() as console:
        status, body = await console.get("/api/queue/9")
        assert status == 404 and "position 9" in body["error"]
        assert (await console.get("/api/queue/x"))[0] == 404
        assert (await console.get("/static/../config.py"))[0] == 404


@pytest.mark.parametrize(
    ("path", "reader"),
    [
        ("/api/trajectories", "operator"),
        ("/api/groups/t", "operator"),
        ("/api/data_set?tag=train", "operator"),
        ("/api/search?text=a", "admin"),
        ("/api/trajectories/t:0:0", "admin"),
        ("/api/trajectories/t:0:0/turns/0/tokens", "admin"),
        ("/api/trajectories/t:0:0/turns/0/values", "admin"),
    ],
)
async def test_trajectories_need_the_scope_of_their_rpc(path: str, reader: str) -> None:
    """QueryTrajectories takes an operator, FetchTrajectories an administrator."""
    scopes = ("runner", "viewer", "operator", "admin")
    async with served(WITH_LOGIN) as console:
        console.pool.put("t:0:0", make_turn("t:0:0"))
        assert (await console.get(path))[0] == 401
        for scope in scopes:
            status, _ = await console.get(path, Authorization=f"Bearer {token_of(scope)}")
            assert (status == 200) == (scopes.index(scope) >= scopes.index(reader)), scope
            assert status in (200, 403)


async def test_trajectory_is_served_part_by_part() -> None:
    """From one read of the pool."""
    async with served() as console:
        console.pool.put("t:0:0", make_turn("t:0:0"))
        status, body = await console.get("/api/trajectories/t:0:0")
        assert status == 200 and body["turns"][0]["advantage"] == 0.0
        status, body = await console.get("/api/trajectories/t:0:0/turns/0/tokens?first=1&count=2")
        assert (status, body["ids"], body["total"]) == (200, [2, 3], 5)
        assert console.pool.fetched == ["t:0:0"]
        for path, expected in (
            ("/api/trajectories/u:0:0", 404),
            ("/api/trajectories/t:0:0/turns/9/tokens", 404),
            ("/api/trajectories/t:0:0/turns/0/tokens?count=0", 400),
            ("/api/trajectories?state=x", 400),
            ("/api/search?text=+", 400),
            ("/api/search?text=a", 200),
            ("/api/data_set?tag=train", 200),
            ("/api/trajectories/..%2f..%2fetc", 404),
            ("/api/groups/none", 404),
        ):
            assert (await console.get(path))[0] == expected, path


def test_security_md_has_every_route_of_the_console() -> None:
    """With the right that it needs."""
    text = (STATIC.parents[2] / "SECURITY.md").read_text()
    section = text.partition("## Web console")[2].partition("\n## ")[0]
    rows = {
        route: (service.strip(" `"), scope.strip())
        for line in section.splitlines()
        if line.startswith("| `")
        for routes, service, scope in [line.strip("|").split("|")]
        for route in re.findall(r"`([A-Z]+ [^`]+)`", routes)
    }
    assert {name for name in re.findall(r"`([a-z]+)`", section) if name in TOPIC_RIGHTS} == {
        *TOPIC_RIGHTS
    }
    app = Console(ConsoleConfig()).server.application()
    served_routes = set()
    for route in app.router.routes():
        if route.method != "HEAD" and route.resource is not None:
            served_routes.add(f"{route.method} {route.resource.canonical}")
    assert served_routes == rows.keys()
    assert rows["GET /api/trajectories/{trajectory}"] == ("PoolService", "admin")
    assert rows["GET /api/groups/{task}"] == ("PoolService", "operator")
