"""A small domain with tools, and leases and rollouts of it, for tests of the agent side."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import grpc.aio

from forge.agents.environments.base import Message, Reward, ToolError, Transcript
from forge.agents.environments.payload import required
from forge.agents.rewards import RewardTask
from forge.agents.rollout import Gateway, Rollout
from forge.v1 import common_pb2, scheduler_pb2
from tests.support.agents.scripted_gateway import ScriptedGateway

ADD_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "a + b",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


class SumDomain:
    """Sums, with a tool that adds and a tool that waits for company."""

    name = "sums"
    scaffold = "blackbox"
    max_turns = 4

    def generate(self, rng: Random) -> dict[str, Any]:
        return {"sum": rng.randint(0, 9)}

    def episode(self, payload: Mapping[str, Any]) -> SumEpisode:
        return SumEpisode(required(payload, "sum", int))


class SumEpisode:
    """Right when the answer is the sum."""

    tools = [ADD_TOOL]

    def __init__(self, total: int) -> None:
        self.messages: list[Message] = [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": f"What makes {total}?"},
        ]
        self.closed = False
        self._total = total
        self._meeting = asyncio.Barrier(2)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if name == "meet":
            await self._meeting.wait()
            return "met"
        if name != "add":
            raise ToolError(f"unknown tool {name}")
        return str(arguments["a"] + arguments["b"])

    def score(self, transcript: Transcript) -> list[Reward]:
        right = transcript.answer == str(self._total)
        failed = [
            Reward(name="failed_call", kind="process", value=-1.0, turn_index=turn)
            for turn in transcript.failed_calls
        ]
        return [Reward(name="right", kind="outcome", value=float(right)), *failed]

    async def close(self) -> None:
        self.closed = True


class BlockingDomain(SumDomain):
    """Its score blocks the runner's event loop until a file exists; it makes another first."""

    name = "blocking"

    def episode(self, payload: Mapping[str, Any]) -> BlockingEpisode:
        return BlockingEpisode(Path(payload["began"]), Path(payload["until"]))


class BlockingEpisode(SumEpisode):
    """Right whatever is answered."""

    def __init__(self, began: Path, until: Path) -> None:
        super().__init__(0)
        self._began = began
        self._until = until

    def score(self, transcript: Transcript) -> list[Reward]:
        self._began.touch()
        while not self._until.exists():
            time.sleep(0.02)
        return [Reward(name="right", kind="outcome", value=1.0)]


def rollout(
    gateway: ScriptedGateway, *, token: str = "token", max_turns: int = 4, **payload: Any
) -> Rollout:
    """One attempt at a sum through a gateway, on a channel of its own."""
    return Rollout(
        trajectory_id=f"{token}:0:0",
        task_id=token,
        domain="sums",
        payload=payload,
        gateway=Gateway(
            instance_id="gateway-0",
            http_url=f"http://127.0.0.1:{gateway.http_port}",
            grpc_address=f"127.0.0.1:{gateway.grpc_port}",
            channel=grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}"),
        ),
        session_token=token,
        max_turns=max_turns,
        max_tokens=32,
        temperature=None,
    )


def lease(number: int = 0, *, lease_s: float = 30.0, **task: Any) -> scheduler_pb2.RolloutLease:
    """A claim on rollout `number`; its tokens are "token-<number>" and "grader-<number>"."""
    payload = task.pop("payload", {"sum": 4})
    fields: dict[str, Any] = {"domain": "sums", "scaffold": "blackbox", "group_size": 1} | task
    return scheduler_pb2.RolloutLease(
        lease_id=f"lease-{number}",
        task=common_pb2.Task(task_id=f"t{number}", payload_json=json.dumps(payload), **fields),
        trajectory_id=f"t{number}:0:0",
        session_token=f"token-{number}",
        grader_token=f"grader-{number}",
        lease_s=lease_s,
    )


def polite(trajectory: Transcript, task: RewardTask) -> list[Reward]:
    """A reward function: the share of answers that say what the payload wants."""
    right = trajectory.answer == task.payload["wanted"]
    return [Reward(name="polite", kind="outcome", value=float(right))]
