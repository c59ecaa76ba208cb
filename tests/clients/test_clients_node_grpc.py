"""The Node example: grpc-js over the protos as they are, no generated code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge.runtime.coordination import Coordinator, Instance
from tests.support.clients.example_run import EXAMPLES, ROOT, run_example
from tests.support.clients.matrix import Row
from tests.support.clients.programs import VENV, check_linear
from tests.support.gateway.script import scripted
from tests.support.gateway.stack import GatewayStack

INSTALL_S = 120
ROW = Row(client="@grpc/grpc-js", protocol="grpc", stream=True, tools=False)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, installed from its lock file in a copy: the work tree stays as it is."""
    folder = tmp_path_factory.mktemp("node") / "example"
    shutil.copytree(EXAMPLES / "node_grpc", folder, ignore=shutil.ignore_patterns("node_modules"))
    installed = subprocess.run(
        [str(VENV / "bin/npm"), "ci", "--loglevel=error"],
        cwd=folder,
        # All of it: where the registry is, and how it is reached, is the environment's to say.
        env=os.environ | {"PATH": f"{VENV / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
    )
    assert installed.returncode == 0, f"npm ci: {installed.stdout}{installed.stderr}"
    return folder / "agent.mjs"


async def test_node_program_without_stubs_is_an_agent(
    program: Path,
    stack: GatewayStack,
    gateway: Instance,
    clients_coordinator: Coordinator,
    matrix: Callable[..., Any],
) -> None:
    """It finds the gateway in its environment, streams two turns, and continues its own answer."""
    package = json.loads((program.parent / "node_modules/@grpc/grpc-js/package.json").read_text())
    matrix(ROW, version=package["version"])
    run = await run_example(
        # The copy is not where the protos are two folders up.
        f"env FORGE_PROTOS={ROOT / 'protos'} {VENV / 'bin/node'} {program}",
        prompt=scripted("What is 2 + 2?", "I will think: four.", "4"),
        stack=stack,
        gateway=gateway,
        coordinator=clients_coordinator,
    )
    assert run.transcript.answer == "4"
    assert len(run.trajectory.turns) == 2
    check_linear(run.trajectory)
