"""Programs of a model run within limits, and what they did wrong is told in one line."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from forge.agents.sandbox import Limits, Sandbox


@pytest.fixture
def sandbox() -> Sandbox:
    return Sandbox(Limits(wall_s=60.0))


async def test_output_comes_back(sandbox: Sandbox) -> None:
    """What a program prints is its result."""
    outcome = await sandbox.run("v = [3, 4]; print(max(v) - min(v))")
    assert (outcome.output.strip(), outcome.error) == ("1", "")


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        ("print(1 / 0)", "ZeroDivisionError"),
        ("print(", "SyntaxError"),
        ("open('/tmp/forge-sandbox-escape', 'w')", "not allowed"),
        ("import os; os.system('true')", "not allowed"),
        ("import socket; socket.socket().connect(('127.0.0.1', 9))", "not allowed"),
        ("x = bytearray(1 << 40)", "MemoryError"),
        ("import os; os._exit(3)", ""),
    ],
)
async def test_misdeed_is_refused_and_named(sandbox: Sandbox, program: str, complaint: str) -> None:
    """Whatever a calculation does not need ends the program with its name."""
    outcome = await sandbox.run(program)
    assert outcome.error
    assert complaint in outcome.error


async def test_endless_program_is_ended() -> None:
    """A loop without end costs its deadline, and no process stays behind."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    outcome = await Sandbox(Limits(wall_s=0.5)).run("while True: pass")
    assert outcome.error
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert not left


async def test_flood_of_output_is_cut_off(sandbox: Sandbox) -> None:
    """Output beyond the limit ends the program instead of filling memory."""
    outcome = await sandbox.run("while True: print('x' * 4096)")
    assert outcome.error


async def test_many_programs_run_side_by_side(sandbox: Sandbox) -> None:
    """Each gets its own output, however many wait for a slot."""
    outcomes = await asyncio.gather(*(sandbox.run(f"print({n} * 2)") for n in range(24)))
    assert [outcome.output.strip() for outcome in outcomes] == [str(2 * n) for n in range(24)]
