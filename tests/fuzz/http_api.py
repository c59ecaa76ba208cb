"""Fuzzes a real gateway process by its own OpenAPI document, with schemathesis.

    python -m tests.fuzz.http_api --max-examples 200

Starts etcd, a pool, a scripted engine and a gateway. schemathesis makes valid and invalid requests
of every operation and checks each response: status, content type and schema are in the document,
and no status is 500 or above but 503. Exits with 1 after a failure.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from forge.runtime.coordination import Coordinator
from forge.runtime.process.child_processes import dying_with_parent
from tests.support.gateway.stack import GatewayStack
from tests.support.runtime.etcd import EtcdServer

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "ignored_auth",
)
CLOSE = "/v1/forge/close"
"""Ends the session, so it is last and has a session of its own."""


def config(token: str) -> str:
    """Settings of schemathesis: a token in the path is valid, 503 is no failure."""
    return f"""
parameters = {{ "path.token" = "{token}" }}
[checks.not_a_server_error]
expected-statuses = ["1xx", "2xx", "3xx", "4xx", 503]
"""


async def address(stack: GatewayStack) -> str:
    """Where the gateway serves HTTP, once the cluster is complete."""
    coordinator = await Coordinator.connect(stack.etcd.endpoint, cluster=stack.cluster)
    try:
        return (await stack.gateway(coordinator)).metadata["http"]
    finally:
        await coordinator.close()


def fuzz(base: str, folder: Path, token: str, *options: str) -> int:
    """Runs schemathesis with a token; returns its exit status."""
    file = folder / "schemathesis.toml"
    file.write_text(config(token))
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(file)),
        *("run", f"{base}/openapi.json", "--url", base),
        *("--header", f"Authorization: Bearer {token}", "--checks", ",".join(CHECKS)),
        *("--phases", "coverage,fuzzing", "--continue-on-failure", "--warnings", "off"),
        *("--request-timeout", "60", "--generation-database", "none"),
        *options,
    ]
    return subprocess.run(dying_with_parent(command), check=False).returncode


def main(
    max_examples: Annotated[int, typer.Option(help="Requests of each operation.")] = 100,
    seed: Annotated[int | None, typer.Option(help="Seed; a random one by default.")] = None,
) -> None:
    """Fuzzes the HTTP API; exits with 1 after a failure."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        etcd = EtcdServer(folder / "etcd")
        etcd.start()
        stack = GatewayStack(folder=folder / "stack", etcd=etcd, cluster="fuzz")
        options = ["--max-examples", str(max_examples)]
        options += ["--seed", str(seed)] if seed is not None else []
        try:
            stack.pool.start()
            stack.start_engine("engine-0")
            stack.start_gateway("gateway-0", "--model.aliases", "*")
            base = f"http://{asyncio.run(address(stack))}"
            failed = [
                fuzz(
                    base,
                    folder,
                    stack.token(f"fuzz:{at}:0"),
                    f"--{rule}-path-regex",
                    CLOSE,
                    *options,
                )
                for at, rule in enumerate(("exclude", "include"))
            ]
            alive = stack.processes["gateway-0"].poll() is None
        finally:
            stack.stop()
            etcd.stop()
    if not alive:
        print("the gateway has ended", file=sys.stderr)
    sys.exit(1 if any(failed) or not alive else 0)


if __name__ == "__main__":
    typer.run(main)
