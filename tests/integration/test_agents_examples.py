"""The Python examples as programs of their own, and the trees they leave on record."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from forge.core.trajectory import NO_PARENT
from forge.runtime.coordination import Coordinator
from forge.v1 import common_pb2
from tests.support.clients.example_run import EXAMPLES, ExampleRun, run_example
from tests.support.gateway.stack import GatewayStack, token_tree
from tests.support.runtime.etcd import EtcdServer

CLUSTER = "examples"


class Examples:
    """Runs examples, all against one gateway."""

    def __init__(self, stack: GatewayStack, coordinator: Coordinator) -> None:
        self._stack = stack
        self._coordinator = coordinator

    async def run(self, file: str, prompt: str) -> ExampleRun:
        return await run_example(
            f"{sys.executable} {EXAMPLES / file}",
            prompt=prompt,
            stack=self._stack,
            gateway=await self._stack.gateway(self._coordinator),
            coordinator=self._coordinator,
        )


@pytest_asyncio.fixture(scope="module")
async def examples(
    shared_etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Examples]:
    stack = GatewayStack(
        folder=tmp_path_factory.mktemp("examples"), etcd=shared_etcd, cluster=CLUSTER
    )
    stack.start()
    coordinator = await Coordinator.connect(shared_etcd.endpoint, cluster=CLUSTER)
    yield Examples(stack, coordinator)
    await coordinator.close()
    stack.stop()


def roots(trajectory: common_pb2.Trajectory) -> list[int]:
    return [turn.turn_index for turn in trajectory.turns if turn.parent_turn == NO_PARENT]


async def test_parallel_sub_agents_are_one_context_tree(examples: Examples) -> None:
    """Every helper's context begins with the lead's plan, stored once for the session."""
    run = await examples.run("multi_agent.py", "Say SAY[[a blue door]]")
    turns = run.trajectory.turns
    assert run.transcript.answer == "a blue door"
    assert len(turns) == 1 + 3 * 2 + 1
    assert roots(run.trajectory) == [0]
    tree = token_tree(run.trajectory)
    plan = tree.sequence(0)
    for turn in turns[1:]:
        assert tree.context(turn.turn_index).startswith(plan)
        assert turn.prefix_tokens * 4 >= len(plan)
    stored = sum(len(turn.prompt_ids) + len(turn.sampled.ids) for turn in turns)
    assert stored < sum(len(tree.sequence(turn.turn_index)) for turn in turns) / 2


async def test_threads_share_a_session(examples: Examples) -> None:
    """The blocking client's calls from three threads are turns of one trajectory."""
    run = await examples.run("threads.py", "Say SAY[[six]]")
    assert run.transcript.answer == "six"
    assert len(run.trajectory.turns) == 3
