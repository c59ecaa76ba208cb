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
from structlog.testing import capture_logs

from forge import v1
from forge.core.errors import NotFound
from forge.runtime.process import drain
from forge.runtime.rpc import RpcServer, current_claims
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Claims, Keyring
from services.gateway import service as gateway
from services.gateway.config import ConnectionSettings
from services.gateway.http.edge import Edge
from services.gateway.http.server import HttpServer
from services.gateway.model_table import ModelTable
from services.inference.router.role import SCOPES as ROUTER
from services.pool import service as pool
from services.scheduler import service as scheduler
from services.trainer import service as trainer
from tests.support.gateway.limits import edge_limits

GOOD = (
    *("session", "other session", "grader", "other grader"),
    *("runner", "rank", "viewer", "operator", "admin", "service"),
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
CLOSE = "POST /v1/forge/close"
MATRIX = {
    "SchedulerService/SubmitTasks": OPERATOR,
    "SchedulerService/SetActivity": OPERATOR,
    "SchedulerService/SetRunnerDraining": OPERATOR,
    "SchedulerService/DropGroups": OPERATOR,
    "SchedulerService/RetireShard": OPERATOR,
    "SchedulerService/DeclareShardLost": ADMIN,
    "SchedulerService/GetQueue": VIEWER,
    "SchedulerService/ListGroups": OPERATOR,
    "SchedulerService/GetSchedulerStatus": VIEWER,
    "SchedulerService/LeaseRollouts": RUNNER,
    "SchedulerService/RenewRollouts": RUNNER,
    "SchedulerService/FinishRollouts": RUNNER,
    "SchedulerService/RenewToken": RUNNER,
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
    "PoolService/SearchTrajectories": ADMIN,
    "PoolService/TailTrajectories": OPERATOR,
    "PoolService/CompactShard": OPERATOR,
    "PoolService/FetchTrajectories": {"rank", *ADMIN},
    "PoolService/EraseTrajectories": ADMIN,
    "PoolService/FreeArchivedGroups": ADMIN,
    "PoolService/ListGroupsToMove": SERVICE,
    "PoolService/ImportGroups": SERVICE,
    "PoolService/ExportGroups": SERVICE,
    "PoolService/MarkGroupsMoved": SERVICE,
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
    "WorkerService/WorkerStream": SERVICE,
    "CacheService/WatchCache": SERVICE,
    "WeightService/FetchWeights": SERVICE,
    "WeightService/FetchManifest": SERVICE,
    "WeightService/JoinGroup": SERVICE,
    "TrainerService/GetTrainerStatus": VIEWER,
    "TrainerService/WatchSteps": VIEWER,
    "TrainerService/SaveCheckpoint": OPERATOR,
    "TrainerService/ListWeights": VIEWER,
    "TrainerService/RollBackWeights": OPERATOR,
    "TrainerService/StartWeightCanary": OPERATOR,
    "TrainerService/PromoteWeights": OPERATOR,
    "TrainerService/FetchTokenValues": ADMIN,
    "TrainerService/FetchCheckpoint": SERVICE,
    "DrainService/SetDraining": OPERATOR,
    "ClockService/GetClock": ALL,
    "GET /healthz": ALL,
    "POST /v1/chat/completions": SESSIONS,
    "POST /v1/completions": SESSIONS,
    "POST /v1/responses": SESSIONS,
    "GET /v1/responses": SESSIONS,
    "GET /v1/responses/{response}": SESSIONS,
    "DELETE /v1/responses/{response}": SESSIONS,
    "POST /v1/messages": SESSIONS,
    "POST /v1/messages/count_tokens": SESSIONS,
    "GET /v1/models": SESSIONS,
    "GET /v1/models/{model}": SESSIONS,
    "POST /v1/embeddings": SESSIONS,
    "POST /tokenize": SESSIONS,
    "POST /detokenize": SESSIONS,
    "POST /v1beta/models/{model}:generateContent": SESSIONS,
    "POST /v1/models/{model}:generateContent": SESSIONS,
    "POST /v1beta/models/{model}:streamGenerateContent": SESSIONS,
    "POST /v1/models/{model}:streamGenerateContent": SESSIONS,
    "POST /v1beta/models/{model}:countTokens": SESSIONS,
    "POST /v1/models/{model}:countTokens": SESSIONS,
    "GET /v1beta/models": SESSIONS,
    "GET /v1beta/models/{model}": SESSIONS,
    CLOSE: GRADERS,
    "GET /openapi.json": SESSIONS,
}
"""Accepted credentials of each call; routes below /s/{token} are the same with the token in the
path. A session reaches its own trajectory alone, by the claims of its token:
`tests/integration/test_gateway_other_tenant.py` shows it for each of its calls."""

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
MODULES = {module.FULL_NAME: module for module in (scheduler, pool, gateway, trainer, drain)}
SCOPES: dict[str, Any] = {name: module.SCOPES for name, module in MODULES.items()}
SCOPES["forge.v1.InferenceService"] = ROUTER
"""Of the services that register any; the others need "service"."""
AUDITED = {f"{name[9:]}/{call}" for name, module in MODULES.items() for call in module.AUDITED}
READS = (
    "Search",
    "Get",
    "List",
    "Scan",
    "LookUp",
    "Query",
    "Tail",
    "Watch",
    "Fetch",
    "OpenSession",
)
"""First words of the calls that change nothing."""
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


async def code_of(channel: Any, path: str, method: Any, token: str) -> Any:
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


def audit_line(call: str, credential: str, code: str) -> list[tuple[str, str, str]]:
    """The line for a call of `AUDITED`, unless by a session, and for each refused scope."""
    if code != "PERMISSION_DENIED" and (call not in AUDITED or credential in SESSIONS):
        return []
    return [(call, "" if credential in BAD else credential, code)]


async def test_every_rpc_accepts_only_the_credentials_of_its_row() -> None:
    """All others are UNAUTHENTICATED or PERMISSION_DENIED, before the handler. The audit log has
    every change by a person or a grader, and every refused scope."""
    server = RpcServer(service="all", host="127.0.0.1", port=0, security=security())
    stub = Stub()
    for name, service in SERVICES.items():
        if name != "forge.v1.ClockService":
            server.add_service(
                partial(stub.register, service),
                stub,
                full_name=name,
                scopes=SCOPES.get(name, "service"),
                audited=MODULES[name].AUDITED if name in MODULES else (),
            )
    rows: dict[str, set[str]] = {}
    due: list[tuple[str, str, str]] = []
    address = await server.start()
    with capture_logs() as logs:
        async with grpc.aio.insecure_channel(address) as channel:
            for name, service in SERVICES.items():
                for method in service.methods:
                    accepted = rows[f"{service.name}/{method.name}"] = set()
                    for credential in (*BAD, *GOOD):
                        token = "" if credential == "none" else token_of(credential, service.name)
                        stub.trajectories.clear()
                        code = await code_of(channel, f"/{name}/{method.name}", method, token)
                        due += audit_line(f"{service.name}/{method.name}", credential, code.name)
                        if code not in DENIED:
                            accepted.add(credential)
                            if name != "forge.v1.ClockService":
                                assert stub.trajectories == [TRAJECTORIES.get(credential, "")]
                        else:
                            assert stub.trajectories == []
        # A handler that aborts ends after its client has the status.
        await server.stop(grace_s=30.0)
    lines = [line for line in logs if line["event"] == "audit"]
    written = [(line["method"], line["subject"], line["code"]) for line in lines]
    assert sorted(written) == sorted(due)
    assert rows == {call: accepted for call, accepted in MATRIX.items() if " " not in call}


async def test_every_route_accepts_only_the_credentials_of_its_row() -> None:
    """All others get 401 or 403; in the path a token works as in the header."""
    turns: Any = SimpleNamespace(
        model=SimpleNamespace(name="m"), other=None, context_limit=lambda claims: 1
    )
    edge: Any = Edge(
        turns=turns,
        sessions=SimpleNamespace(use_session=no_session),  # type: ignore[arg-type]
        pool=SimpleNamespace(),  # type: ignore[arg-type]
        security=security(),
        models=ModelTable(turns, ("m",)),
        body_timeout_s=60.0,
        **edge_limits(),
    )
    server = HttpServer(edge, max_body_bytes=1 << 20, connections=ConnectionSettings())
    port = await server.start("127.0.0.1", 0)
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
                with capture_logs() as logs:
                    async with client.request(route.method, url, headers=headers) as response:
                        if response.status not in (401, 403):
                            accepted.add(credential)
                subjects = [line["subject"] for line in logs if line["event"] == "audit"]
                audited = response.status == 403 or (
                    call == CLOSE and credential in GRADERS - SESSIONS
                )
                assert subjects == [credential] * audited
            assert rows.setdefault(call, accepted) == accepted, route.resource.canonical
    await server.stop()
    assert rows == {call: accepted for call, accepted in MATRIX.items() if " " in call}


def test_every_change_by_people_or_graders_is_audited() -> None:
    """A new RPC is a read by its name, or in the AUDITED of its service."""
    callers = VIEWER - SERVICE | {"grader"}
    changes = {
        call
        for call, accepted in MATRIX.items()
        if accepted & callers and " " not in call and not call.partition("/")[2].startswith(READS)
    }
    # A runner renews nothing but its token.
    assert changes | {"SchedulerService/RenewToken"} == AUDITED


def rendered() -> str:
    """The matrix as a table of SECURITY.md."""
    columns = {name: name for name in ("none", *GOOD) if name != "other grader"}
    columns["other session"] = "session of another tenant"
    heads = " | ".join(columns.values())
    lines = [f"| call | {heads} | audit log |", "|---" * (len(columns) + 2) + "|"]
    for call, accepted in MATRIX.items():
        cells = ["yes" if column in accepted else "" for column in columns]
        if "none" not in accepted and "other session" in accepted:
            cells[list(columns).index("other session")] = "own"
        cells.append("yes" if call in AUDITED or call == CLOSE else "")
        lines.append(f"| `{call}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_security_md_has_the_matrix() -> None:
    """To update it, replace the table by the output of `rendered`."""
    assert rendered() in (Path(__file__).parents[2] / "SECURITY.md").read_text()
