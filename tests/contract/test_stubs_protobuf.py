"""The committed stubs run under protobuf 6 (TensorRT-LLM pins < 7) and 7 alike."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(path.stem for path in (ROOT / "forge" / "v1").glob("*_pb2*.py"))

PROGRAM = """
import importlib, sys
import google.protobuf
for module in sys.argv[2:]:
    importlib.import_module(f"forge.v1.{module}")
from forge.v1 import common_pb2, pool_pb2
assert google.protobuf.__version__.startswith(sys.argv[1]), google.protobuf.__version__
turn = common_pb2.Turn(trajectory_id="t:0:0", turn_index=3, prompt_ids=bytes(8))
turn.sampled.ids = bytes(4)
record = pool_pb2.AppendTurnsRequest(sequence=1)
record.turn.data = turn.SerializeToString()
back = common_pb2.Turn.FromString(pool_pb2.AppendTurnsRequest.FromString(
    record.SerializeToString()).turn.data)
assert back == turn
print(google.protobuf.__version__)
"""


def installed(requirement: str) -> Path:
    """A folder with that protobuf alone, installed once per checkout."""
    name = "".join(char if char.isalnum() else "-" for char in requirement)
    folder = ROOT / ".venv-stubs" / name
    folder.parent.mkdir(exist_ok=True)
    if (folder / "google" / "protobuf" / "__init__.py").exists():
        return folder
    with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--target", fresh, requirement]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode:
            pytest.fail(
                f"{requirement} could not be installed, so the stubs were not tried under it; "
                f"is the package index reachable? {done.stderr.strip().splitlines()[-1:]}",
                pytrace=False,
            )
        folder.mkdir(exist_ok=True)
        # Moved into place whole: a second test run never sees half a package.
        (Path(fresh) / "google").replace(folder / "google")
    return folder


@pytest.mark.parametrize(
    ("requirement", "version"), [("protobuf>=6.33,<7", "6."), ("protobuf>=7,<8", "7.")]
)
def test_stubs_import_and_round_trip_under_both_protobuf_lines(
    requirement: str, version: str
) -> None:
    """Every generated module imports, and a turn survives serialization, under either line."""
    assert "pool_pb2_grpc" in MODULES
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, version, *MODULES],
        env={**os.environ, "PYTHONPATH": f"{installed(requirement)}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(version)
