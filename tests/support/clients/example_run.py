"""A program of `examples/` run against a real gateway as the runner would run it.

Owns the rollout around the program. What the gateway recorded is sealed and read back, exact.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from forge.agents.domains import PromptDomain
from forge.agents.environments.base import Transcript
from forge.agents.launchers.base import ProgramLimits
from forge.agents.launchers.wrapped import SandboxLauncher
from forge.agents.rollout import Gateway, Rollout
from forge.agents.sandbox.process_sandbox import ProcessSandbox
from forge.agents.scaffolds.command import Command, command_words
from forge.runtime.coordination import Coordinator, Instance
from forge.runtime.rpc.channel import Channels
from forge.runtime.security.credentials import Security
from forge.v1 import common_pb2
from tests.support.gateway.stack import GatewayStack, check_exact, recorded

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleRun:
    """What came of it."""

    transcript: Transcript
    trajectory: common_pb2.Trajectory


async def run_example(
    command: str, *, prompt: str, stack: GatewayStack, gateway: Instance, coordinator: Coordinator
) -> ExampleRun:
    """Run it to its end. Raises `RuntimeError` with its last words when it fails."""
    trajectory_id = f"example-{next(_numbers)}:0:0"
    token = stack.token(trajectory_id)
    channels = Channels(Security(stack.pool.keyring, subject="test"))
    rollout = Rollout(
        trajectory_id=trajectory_id,
        task_id=trajectory_id.partition(":")[0],
        domain="code",
        payload={},
        gateway=Gateway(
            instance_id=gateway.instance_id,
            http_url=f"http://{gateway.metadata['http']}",
            grpc_address=gateway.address,
            channel=channels.get(gateway.address),
        ),
        session_token=token,
        max_turns=64,
        max_tokens=64,
        temperature=None,
    )
    words, limits = command_words(command), ProgramLimits(memory_bytes=0, processes=0)
    sandbox = ProcessSandbox(tmp_bytes=limits.tmp_bytes)
    launcher = SandboxLauncher(sandbox, limits=limits, words=words)
    await launcher.check()
    scaffold = Command(words, launcher=launcher)
    transcript = await scaffold.run(rollout, PromptDomain("code").episode({"prompt": prompt}))
    await channels.close()
    async with stack.agent(gateway, token) as session:
        await session.close(min_turns=transcript.turns)
    trajectory = await recorded(stack, coordinator, trajectory_id)
    check_exact(stack, trajectory)
    return ExampleRun(transcript=transcript, trajectory=trajectory)
