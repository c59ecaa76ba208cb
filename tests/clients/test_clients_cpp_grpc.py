"""The C++ example, built with the distribution's packages."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge.runtime.coordination import Coordinator, Instance
from tests.support.clients.example_run import EXAMPLES, run_example
from tests.support.clients.matrix import Row
from tests.support.clients.programs import check_linear
from tests.support.gateway.script import scripted
from tests.support.gateway.stack import GatewayStack

ROW = Row(client="grpc++", protocol="grpc", stream=True, tools=False)
NEEDED = ("cmake", "g++", "pkg-config", "protoc", "grpc_cpp_plugin")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's executable; compiling what grpc includes takes a minute of one core."""
    missing = [tool for tool in NEEDED if shutil.which(tool) is None]
    if not missing and subprocess.run(["pkg-config", "--exists", "grpc++"]).returncode:
        missing = ["libgrpc++-dev"]
    if missing:
        packages = (EXAMPLES / "cpp_grpc/CMakeLists.txt").read_text().splitlines()[0]
        pytest.skip(f"no {', '.join(missing)}; {packages.removeprefix('# ')}")
    folder = tmp_path_factory.mktemp("cpp")
    for argv in (
        ["cmake", "-S", str(EXAMPLES / "cpp_grpc"), "-B", str(folder)],
        ["cmake", "--build", str(folder)],
    ):
        built = subprocess.run(argv, capture_output=True, text=True)
        assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    return folder / "agent"


@pytest.mark.timeout(1200)
async def test_cpp_program_is_an_agent(
    program: Path,
    stack: GatewayStack,
    gateway: Instance,
    clients_coordinator: Coordinator,
    matrix: Callable[..., Any],
) -> None:
    """It finds the gateway in its environment, streams two turns, and continues its own answer."""
    found = subprocess.run(["pkg-config", "--modversion", "grpc++"], capture_output=True, text=True)
    matrix(ROW, version=found.stdout.strip())
    run = await run_example(
        str(program),
        prompt=scripted("What is 2 + 2?", "I will think: four.", "4"),
        stack=stack,
        gateway=gateway,
        coordinator=clients_coordinator,
    )
    assert run.transcript.answer == "4"
    assert len(run.trajectory.turns) == 2
    check_linear(run.trajectory)
