"""The access matrix: every RPC and every HTTP route x every credential.

RPCs come from the proto descriptors and routes from the gateway's router, so a new one without a
row fails. SECURITY.md has the same table. Behind the door a stub serves, with the scopes that the
services register.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any

import aiohttp
import grpc.aio

from forge import v1
from forge.core.errors import NotFound
from forge.runtime.rpc import RpcServer, current_claims
from forge.runtime.security import Security
from forge.runtime.tokens import Claims, Keyring
from services.gateway.http.edge import Edge
from services.gateway.http.server import HttpServer
from services.gateway.service import SCOPES as GATEWAY
from services.inference.router.role import SCOPES as ROUTER
from services.pool.service import SCOPES as POOL
from services.scheduler.service import SCOPES as SCHEDULER
from services.trainer.service import SCOPES as TRAINER

GOOD = (
    *("session", "other session", "grader", "other grader"),
    *("runner", "viewer", "operator", "admin", "service"),
)
BAD = ("none", "garbage", "another key", "expired", "revoked", "another audience")
SESSIONS = {"session", "other session"}
GRADERS = {*SESSIONS, "grader", "other grader"}
TRAJECTORIES = {"session": "t:0:0", "grader": "t:0:0"} | {
    "other session": "u:0:0",
    "other grader": "u:0:0",
}
"""Trajectory in the claims of a credential."""
SERVICE = {"service"}
ADMIN = {"admin", "service"}
OPERATOR = {"operator", "admin", "service"}
VIEWER = {"viewer", "operator", "admin", "service"}
RUNNER = {"runner", "service"}
ALL = {*GOOD, *BAD}
MATRIX = {
    "SchedulerService/SubmitTasks": OPERATOR,
    "SchedulerService/SetActivity": OPERATOR,
    "SchedulerService/DropGroups": OPERATOR,
    "SchedulerService/ListGroups": OPERATOR,
    "SchedulerService/GetSchedulerStatus": VIEWER,
    "SchedulerService/LeaseRollouts": RUNNER,
    "SchedulerService/RenewRollouts": RUNNER,
    "SchedulerService/FinishRollouts": RUNNER,
    "SchedulerService/LeaseBatch": SERVICE,
    "SchedulerService/RenewBatch": SERVICE,
    "SchedulerService/CommitBatch": SERVICE,
    "SchedulerService/ReleaseBatch": SERVICE,
    "SchedulerService/Rewind": SERVICE,
    "PoolService/PutGroups": SERVICE,
    "PoolService/SetGroupStates": SERVICE,
    "PoolService/AppendTurns": SERVICE,
    "PoolService/AppendRewards": SERVICE,
    "PoolService/SealTrajectory": SERVICE,
    "PoolService/ScanGroups": OPERATOR,
    "PoolService/LookUpGroups": OPERATOR,
    "PoolService/GetSummaries": OPERATOR,
    "PoolService/QueryTrajectories": OPERATOR,
    "PoolService/TailTrajectories": OPERATOR,
    "PoolService/CompactShard": OPERATOR,
    "PoolService/FetchTrajectories": ADMIN,
    "PoolService/EraseTrajectories": ADMIN,
    "PoolService/GetPoolStats": VIEWER,
    "PoolReplicaService/Follow": SERVICE,
    "PoolReplicaService/FetchRecords": SERVICE,
    "PoolReplicaService/PurgeErased": SERVICE,
    "GatewayService/OpenSession": GRADERS,
    "GatewayService/Chat": SESSIONS,
    "GatewayService/Generate": SESSIONS,
    "GatewayService/Annotate": GRADERS,
    "GatewayService/CloseSession": GRADERS,
    "InferenceService/Sample": SERVICE,
    "InferenceService/SampleStream": SERVICE,
    "InferenceService/GetInferenceStatus": VIEWER,
    "PrefillService/Prefill": SERVICE,
    "PrefillService/FetchKv": SERVICE,
    "PrefillService/ReleaseKv": SERVICE,
    "DecodeService/Decode": SERVICE,
    "WeightService/FetchWeights": SERVICE,
    "TrainerService/GetTrainerStatus": VIEWER,
    "TrainerService/WatchSteps": VIEWER,
    "TrainerService/SaveCheckpoint": OPERATOR,
    "ClockService/GetClock": ALL,
    "GET /healthz": ALL,
    "POST /v1/chat/completions": SESSIONS,
    "POST /v1/responses": SESSIONS,
    "GET /v1/responses/{response}": SESSIONS,
    "DELETE /v1/responses/{response}": SESSIONS,
    "POST /v1/messages": SESSIONS,
    "POST /v1/messages/count_tokens": SESSIONS,
    "GET /v1/models": SESSIONS,
    "GET /v1/models/{model}": SESSIONS,
    "POST /v1/forge/close": GRADERS,
}
"""Accepted credentials of each call; routes below /s/{token} are the same with the token in the
path. A session reaches its own trajectory alone, by the claims of its token."""

FILES = [
    import_module(f"forge.v1.{found.name}")
    for found in iter_modules(v1.__path__)
    if found.name.endswith("_pb2")
]
SERVICES = {
    service.full_name: service
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
}
SCOPES: dict[str, Any] = {
    "forge.v1.SchedulerService": SCHEDULER,
    "forge.v1.PoolService": POOL,
    "forge.v1.GatewayService": GATEWAY,
    "forge.v1.InferenceService": ROUTER,
    "forge.v1.TrainerService": TRAINER,
}
"""Of the services that register any; the others need "service"."""
KEYRING = Keyring.from_bytes(b"k" * 32)
DENIED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


def token_of(credential: str, audience: str) -> str:
    """The token of a credential for a call to `audience`; the bad ones would have every scope."""
    every = frozenset({"service", "session", "grader"})
    claims = Claims(
        subject=credential,
        scopes=every if credential in BAD else frozenset({credential.split()[-1]}),
        token_id=credential,
        trajectory_id=TRAJECTORIES.get(credential, ""),
        audience=frozenset({"OtherService" if credential == "another audience" else audience}),
        expires_unix_s=1.0 if credential == "expired" else time.time() + 3600,
    )
    if credential == "garbage":
        return "v1.garbage.garbage"
    if credential == "another key":
        return Keyring.from_bytes(b"x" * 32).sign(claims)
    return KEYRING.sign(claims)


def security() -> Security:
    made = Security(KEYRING)
    made.revoked = {"revoked": time.time() + 3600}
    return made


class Stub:
    """Serves every method of a service: keeps the trajectory of the claims, then aborts."""

    def __init__(self) -> None:
        self.trajectories: list[str] = []

    def register(self, service: Any, _: Any, server: Any) -> None:
        handlers = {method.name: self._handler(method) for method in service.methods}
        generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
        server.add_generic_rpc_handlers((generic,))

    def _handler(self, method: Any) -> Any:
        async def unary(request: Any, context: Any) -> bytes:
            self.trajectories.append(current_claims().trajectory_id)
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "behind the door")
            raise AssertionError

        async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
            yield await unary(request, context)

        request = "stream" if method.client_streaming else "unary"
        response = "stream" if method.server_streaming else "unary"
        make = getattr(grpc, f"{request}_{response}_rpc_method_handler")
        return make(stream if method.server_streaming else unary)


@asynccontextmanager
async def no_session(claims: Claims) -> AsyncIterator[None]:
    """As a session that the pool does not have."""
    raise NotFound(claims.trajectory_id)
    yield


async def code_of(channel: grpc.aio.Channel, path: str, method: Any, token: str) -> Any:
    """The status of one call."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    options: Any = {"metadata": metadata, "timeout": 30.0}
    try:
        if method.client_streaming:
            response = "stream" if method.server_streaming else "unary"
            # Nothing is written: a write that meets the refusal may change its code.
            return await getattr(channel, f"stream_{response}")(path)(**options).code()
        if method.server_streaming:
            async for _ in channel.unary_stream(path)(b"", **options):
                pass
        else:
            await channel.unary_unary(path)(b"", **options)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_every_rpc_accepts_the_credentials_of_its_row() -> None:
    """And refuses all others as UNAUTHENTICATED or PERMISSION_DENIED, before its handler."""
    server = RpcServer(service="all", host="127.0.0.1", port=0, security=security())
    stub = Stub()
    for name, service in SERVICES.items():
        if name != "forge.v1.ClockService":
            server.add_service(
                partial(stub.register, service),
                stub,
                full_name=name,
                scopes=SCOPES.get(name, "service"),
            )
    rows: dict[str, set[str]] = {}
    address = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        for name, service in SERVICES.items():
            for method in service.methods:
                accepted = rows[f"{service.name}/{method.name}"] = set()
                for credential in (*BAD, *GOOD):
                    token = "" if credential == "none" else token_of(credential, service.name)
                    stub.trajectories.clear()
                    code = await code_of(channel, f"/{name}/{method.name}", method, token)
                    if code not in DENIED:
                        accepted.add(credential)
                        if name != "forge.v1.ClockService":
                            assert stub.trajectories == [TRAJECTORIES.get(credential, "")]
                    else:
                        assert stub.trajectories == []
    await server.stop(grace_s=0.0)
    assert rows == {call: accepted for call, accepted in MATRIX.items() if " " not in call}


async def test_every_route_accepts_the_credentials_of_its_row() -> None:
    """And refuses all others with 401 or 403; in the path a token works as in the header."""
    edge: Any = Edge(
        turns=SimpleNamespace(model=SimpleNamespace(name="m")),  # type: ignore[arg-type]
        sessions=SimpleNamespace(use_session=no_session),  # type: ignore[arg-type]
        pool=SimpleNamespace(),  # type: ignore[arg-type]
        security=security(),
        model_names=frozenset({"m"}),
    )
    server = HttpServer(edge, max_body_bytes=1 << 20)
    port = await server.start("127.0.0.1", 0, None)
    app = server._application(1 << 20)
    rows: dict[str, set[str]] = {}
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        for route in app.router.routes():
            assert route.resource is not None
            if route.method == "HEAD":
                continue
            _, in_path, path = route.resource.canonical.rpartition("/s/{token}")
            call = f"{route.method} {path}"
            accepted = set()
            for credential in (*BAD, *GOOD):
                token = "" if credential == "none" else token_of(credential, "GatewayService")
                below = f"/s/{token or 'none'}" if in_path else ""
                headers = {"Authorization": f"Bearer {token}"} if token and not below else {}
                url = below + path.replace("{response}", "r").replace("{model}", "m")
                async with client.request(route.method, url, headers=headers) as response:
                    if response.status not in (401, 403):
                        accepted.add(credential)
            assert rows.setdefault(call, accepted) == accepted, route.resource.canonical
    await server.stop()
    assert rows == {call: accepted for call, accepted in MATRIX.items() if " " in call}


def rendered() -> str:
    """The matrix as a table of SECURITY.md."""
    columns = ("none", "session", "grader", "runner", "viewer", "operator", "admin", "service")
    lines = ["| call | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for call, accepted in MATRIX.items():
        cells = ["yes" if column in accepted else "" for column in columns]
        lines.append(f"| `{call}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_security_md_has_the_matrix() -> None:
    """To update it, replace the table by the output of `rendered`."""
    assert rendered() in (Path(__file__).parents[2] / "SECURITY.md").read_text()
