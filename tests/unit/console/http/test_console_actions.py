"""Changes by operators in the console: who may make them, what they do, and their audit lines."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from forge.runtime.coordination import Instance
from forge.runtime.process.drain import DRAINING_KEY, DrainServicer
from forge.runtime.rpc.server import RpcServer
from forge.v1 import drain_pb2_grpc, scheduler_pb2
from services.console.config import ConsoleConfig, HttpSettings
from tests.support.console.page import Console, served, token_of

WITH_LOGIN = ConsoleConfig(http=HttpSettings(login="always"))
STEERING = ConsoleConfig(http=HttpSettings(steering=True))
ACTIONS: list[tuple[str, dict[str, Any]]] = [
    ("/api/weights/rollback", {"weight_version": 1}),
    ("/api/weights/canary", {"weight_version": 2, "share": 0.25}),
    ("/api/weights/promote", {}),
    ("/api/queue/activity", {"activity": "paused"}),
    ("/api/services/drain", {"kind": "decode", "instance": "decode-1", "draining": True}),
    ("/api/runners/drain", {"instance": "runner-1", "draining": True}),
]


def nothing_changed(console: Console) -> bool:
    unset = scheduler_pb2.ACTIVITY_UNSPECIFIED
    operator = console.operator
    return not (console.steering.changes or operator.drains) and operator.activity == unset


@pytest.mark.parametrize(("path", "content"), ACTIONS)
async def test_console_without_login_only_reads(path: str, content: dict[str, Any]) -> None:
    """By default: any process of the host could ask."""
    async with served() as console:
        status, body = await console.post(path, content)
        assert status == 403 and "http.steering" in body["error"]
        assert nothing_changed(console)
        assert not (await console.get("/api/session"))[1]["may_steer"]


@pytest.mark.parametrize(("path", "content"), ACTIONS)
async def test_change_needs_the_scope_operator(path: str, content: dict[str, Any]) -> None:
    """And the audience of the service; a refused one is a line of the audit log."""
    async with served(WITH_LOGIN) as console:
        assert (await console.post(path, content))[0] == 401
        for scope in ("runner", "viewer"):
            with capture_logs() as logs:
                token = f"Bearer {token_of(scope)}"
                assert (await console.post(path, content, Authorization=token))[0] == 403
            (line,) = [line for line in logs if line["event"] == "audit"]
            assert line["method"] == f"POST {path}" and line["subject"] == f"ada-{scope}"
        other = f"Bearer {token_of('operator', audience=('PoolService',))}"
        assert (await console.post(path, content, Authorization=other))[0] == 401
        assert nothing_changed(console)


async def test_operator_steers_weights_and_queue() -> None:
    """Under the own name, with an audit line each."""
    async with served(WITH_LOGIN) as console:
        token = f"Bearer {token_of('operator')}"
        with capture_logs() as logs:
            for path, content in ACTIONS[:4]:
                assert (await console.post(path, content, Authorization=token))[0] == 200
            missing = {"weight_version": 7}
            status, body = await console.post(ACTIONS[0][0], missing, Authorization=token)
        assert status == 404 and "version 7 is not held" in body["error"]
        person = "ada-operator"
        assert console.steering.changes == [
            ("roll back", 1, person),
            ("canary", 2, 0.25, person),
            ("promote", person),
        ]
        assert console.operator.activity == scheduler_pb2.ACTIVITY_PAUSED
        lines = [line for line in logs if line["event"] == "audit"]
        assert [line["code"] for line in lines] == ["OK"] * 4 + ["NOT_FOUND"]
        assert {line["subject"] for line in lines} == {person}
        assert lines[1]["targets"] == {"weight_version": 2, "share": 0.25}
        assert (await console.get("/api/session", Authorization=token))[1]["may_steer"]


async def test_setting_allows_changes_without_login() -> None:
    """On loopback. The audit line has the subject `without login`."""
    async with served(STEERING) as console:
        assert (await console.get("/api/session"))[1]["may_steer"]
        with capture_logs() as logs:
            assert (await console.post("/api/weights/promote", {}))[0] == 200
        (line,) = [line for line in logs if line["event"] == "audit"]
        assert line["subject"] == "without login" and line["code"] == "OK"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Host": "evil.example"},
    ],
)
async def test_page_of_another_site_changes_nothing(headers: dict[str, str]) -> None:
    """Also where no login is needed."""
    async with served(STEERING) as console:
        assert (await console.post("/api/weights/promote", {}, **headers))[0] == 421
        assert nothing_changed(console)


async def test_form_of_another_site_changes_nothing() -> None:
    """A browser sends a form without asking first, and never as JSON; a GET is no action."""
    async with served(STEERING) as console:
        for data in ({"weight_version": "1"}, b'{"weight_version": 1}'):
            async with console.client.post("/api/weights/rollback", data=data) as response:
                assert response.status == 400
        assert (await console.get("/api/weights/promote"))[0] == 405
        assert nothing_changed(console)


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/api/weights/rollback", {}),
        ("/api/weights/rollback", {"weight_version": 0}),
        ("/api/weights/rollback", {"weight_version": 1, "other": 1}),
        ("/api/weights/canary", {"weight_version": 1, "share": 1}),
        ("/api/weights/promote", [1]),
        ("/api/queue/activity", {"activity": "stopped"}),
        ("/api/services/drain", {"kind": "pool", "instance": "p", "draining": True}),
        ("/api/services/drain", {"kind": "runner", "instance": "r", "draining": True}),
        ("/api/runners/drain", {"instance": "runner-1"}),
    ],
)
async def test_malformed_changes_are_refused(path: str, content: Any) -> None:
    """With a message, before anything is called."""
    async with served(STEERING) as console:
        status, body = await console.post(path, content)
        assert status == 400 and body["error"]
        assert nothing_changed(console)


async def test_instance_is_drained_and_resumed() -> None:
    """Over its own RPC, which marks it in discovery; an unknown one is not found."""

    class Context:
        def __init__(self) -> None:
            self.metadata: dict[str, str] = {}
            self.announced: list[dict[str, str]] = []

        async def announce(self) -> None:
            self.announced.append(dict(self.metadata))

    worker: Any = Context()
    async with served(STEERING) as console:
        server = RpcServer(service="test", host="127.0.0.1", port=0, security=console.security)
        server.add_service(
            drain_pb2_grpc.add_DrainServiceServicer_to_server,
            DrainServicer(worker, running=lambda: 3),
            full_name="forge.v1.DrainService",
        )
        address = await server.start()
        console.instances = [
            Instance(kind="decode", instance_id="d", address=address, metadata={}, revision=1)
        ]
        drain = {"kind": "decode", "instance": "d", "draining": True}
        for _ in range(2):
            assert (await console.post("/api/services/drain", drain))[0] == 200
        assert (await console.post("/api/services/drain", drain | {"draining": False}))[0] == 200
        assert worker.announced == [{DRAINING_KEY: "1"}, {}]
        assert (await console.post("/api/services/drain", drain | {"instance": "e"}))[0] == 404
        await server.stop(grace_s=0)


async def test_runner_is_drained_over_the_scheduler() -> None:
    """It may have no key to verify an operator with; the scheduler's audit log has the person."""
    async with served(WITH_LOGIN) as console:
        token = f"Bearer {token_of('operator', audience=('SchedulerService',))}"
        for draining in (True, False):
            body = {"instance": "runner-1", "draining": draining}
            assert (await console.post("/api/runners/drain", body, Authorization=token))[0] == 200
        person = "ada-operator"
        assert console.operator.drains == [("runner-1", True, person), ("runner-1", False, person)]
        unknown = {"instance": "runner-2", "draining": True}
        status, answer = await console.post("/api/runners/drain", unknown, Authorization=token)
        assert status == 404 and "runner-2" in answer["error"]
