"""Programs over clients of others, run against a gateway as it is, and what they leave in the pool.

Owns how a program of tests/clients is started, what it is told to find out, and what must then be
on record. A program gets its base URL and key from the environment, the task as its first word;
it prints a report: version of the client, answer, and the parts that the answer came in.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forge.core.token_columns import int32_array
from forge.core.trajectory import NO_PARENT
from forge.runtime.coordination import Coordinator, Instance
from forge.v1 import common_pb2
from tests.support.clients.matrix import Row
from tests.support.gateway.chat_templates import make_model
from tests.support.gateway.script import scripted
from tests.support.gateway.stack import GatewayStack, check_exact, recorded, token_tree
from tests.support.suite.process_guard import mark

ROOT = Path(__file__).parents[3]
VENV = ROOT / ".venv-clients"
NODE_DIR = ROOT / "tests/clients/node"
PROGRAMS_DIR = ROOT / "tests/clients/programs"
TIMEOUT_S = 400.0
"""Of a program or an agent. A test runs up to two, and `make test-clients` gives it 900 s."""


def look_call(at: str) -> str:
    """A tool call, spelled as no template would spell it."""
    return f'<tool_call>\n{{"name":"look","arguments": {{"at":"{at}"}}}}\n</tool_call>'


STEPS = (
    f"I will look around.\n{look_call('shelf')}\n{look_call('box')}",
    look_call("door"),
    "That is all there is.",
)
"""What the model says, turn by turn: two calls at once, one more, and the answer."""
SEEN = ("a red book", "a brass key", "it is locked")
"""What the tool tells in that conversation, and the task does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One row of the matrix: a client, in one of the ways it can be used."""

    name: str
    program: str
    """File name, in `programs` or, of Node's, in `node`."""
    protocol: str
    """chat, responses, messages or gemini."""
    stream: bool = False
    words: tuple[str, ...] = ()
    """What the program is told, besides the task and whether to stream."""
    steps: tuple[str, ...] = STEPS
    """What the model says."""
    seen: tuple[str, ...] = SEEN
    """What must stand in the last context."""
    linear: bool = True
    """Whether it repeats its history as it was; otherwise it makes branches."""

    @property
    def row(self) -> Row:
        """Its place in the table."""
        return Row(client=self.name, protocol=self.protocol, stream=self.stream)

    @property
    def key(self) -> str:
        """For test and trajectory ids."""
        words = (self.name, self.protocol, *self.words, "stream" if self.stream else "whole")
        return re.sub(r"[^a-z0-9]+", "-", "-".join(dict.fromkeys(words)).lower()).strip("-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a program said of itself."""

    version: str
    answer: str
    pieces: int


def argv_of(client: Client) -> list[str]:
    """The program and its task, then what tells how to use the client."""
    told = [scripted("Say what is where.", *client.steps), client.protocol, *client.words]
    told += ["stream"] if client.stream else []
    if client.program.endswith(".mjs"):
        return [str(VENV / "bin/node"), str(NODE_DIR / client.program), *told]
    return [str(VENV / "bin/python"), str(PROGRAMS_DIR / client.program), *told]


def environment(gateway: Instance, token: str, home: Path, *, in_path: bool) -> dict[str, str]:
    """All that a program is given: the way to the model, by key or by path, and an empty home."""
    base = f"http://{gateway.metadata['http']}"
    if in_path:
        base, token = f"{base}/s/{token}", "none"
    return {
        "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}",
        "HOME": str(home),
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_KEY": token,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": token,
        "GOOGLE_GEMINI_BASE_URL": base,
        "GEMINI_API_KEY": token,
        # Or LiteLLM would ask GitHub what models cost.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        **mark(),
    }


async def run_program(argv: list[str], env: Mapping[str, str]) -> Report:
    """Runs it to its end. Raises `AssertionError` with its errors when it fails."""
    process = await asyncio.create_subprocess_exec(
        *argv, env=env, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()[-4000:] + output.decode()[-1000:]
    # Behind it there may be what a framework does to its terminal.
    said = [line for line in output.decode().splitlines() if line.startswith('{"version"')]
    assert said, f"no report in {output.decode()[-1000:]!r}"
    return Report(**json.loads(said[-1]))


async def sealed(
    stack: GatewayStack, gateway: Instance, coordinator: Coordinator, trajectory_id: str
) -> common_pb2.Trajectory:
    """Ends a session and reads what it left, which is exact."""
    async with stack.agent(gateway, stack.token(trajectory_id)) as agent:
        await agent.close()
    trajectory = await recorded(stack, coordinator, trajectory_id)
    check_exact(stack, trajectory)
    assert [turn.parse_error for turn in trajectory.turns] == [""] * len(trajectory.turns)
    return trajectory


def check_linear(trajectory: common_pb2.Trajectory) -> None:
    """Each turn continues the one before it, all of it."""
    lengths = token_tree(trajectory).lengths
    places = [(turn.parent_turn, turn.prefix_tokens) for turn in trajectory.turns]
    assert places == [(NO_PARENT, 0), *enumerate(lengths[:-1])]


def context_text(stack: GatewayStack, trajectory: common_pb2.Trajectory, turn: int) -> str:
    """A turn's whole context, as the model reads it."""
    return make_model(stack.family).decode(int32_array(token_tree(trajectory).context(turn)))
