"""The Python examples as programs of their own, and the trees they leave on record."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from forge.core.trajectory import NO_PARENT
from forge.runtime.coordination import Coordinator
from forge.runtime.serving_groups import kind_in
from forge.v1 import common_pb2
from tests.support.clients.example_run import EXAMPLES, ExampleRun, run_example
from tests.support.gateway.chat_templates import save_model
from tests.support.gateway.stack import START_S, GatewayStack, token_tree
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.service_process import start_service

pytestmark = pytest.mark.commands

CLUSTER = "examples"


def save_weights(directory: Path, *, seed: int) -> None:
    """Adds a configuration and random weights to a directory with a tokenizer."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


class Examples:
    """Runs examples, all against one gateway."""

    def __init__(self, stack: GatewayStack, coordinator: Coordinator) -> None:
        self.stack = stack
        self.coordinator = coordinator

    async def run(self, file: str, prompt: str, *, gateway: str = "gateway-0") -> ExampleRun:
        placeholder = " {prompt}" if gateway != "gateway-0" else ""
        return await run_example(
            f"{sys.executable} {EXAMPLES / file}{placeholder}",
            prompt=prompt,
            stack=self.stack,
            gateway=await self.stack.gateway(self.coordinator, gateway),
            coordinator=self.coordinator,
        )


@pytest_asyncio.fixture(scope="module")
async def examples(
    shared_etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Examples]:
    stack = GatewayStack(
        folder=tmp_path_factory.mktemp("examples"), etcd=shared_etcd, cluster=CLUSTER
    )
    save_weights(stack.model_path, seed=0)
    stack.start()
    coordinator = await Coordinator.connect(shared_etcd.endpoint, cluster=CLUSTER)
    yield Examples(stack, coordinator)
    await coordinator.close()
    stack.stop()


@pytest_asyncio.fixture(scope="module")
async def serving_groups(examples: Examples) -> None:
    """The groups of an older version and a judge, and a gateway that names them."""
    stack = examples.stack
    judge = stack.folder / "judge-model"
    judge.mkdir()
    save_model("llama3", judge)
    save_weights(judge, seed=7)
    for group, model_path in (("old", stack.model_path), ("judge", judge)):
        for role in ("router", "prefill", "decode"):
            name = f"{role}-{group}"
            frozen = () if role == "router" else ("--weights", "frozen")
            stack.processes[name] = start_service(
                "services.inference",
                *stack.shared(name),
                *("--role", role, "--serving-group", group, *frozen),
                *("--model-path", str(model_path)),
            )
    models = {
        "old": {"kind": "version", "open": True},
        "judge": {"kind": "engine", "model_path": str(judge), "open": True},
    }
    stack.start_gateway("models", "--models", json.dumps(models))
    for group in ("old", "judge"):
        for role in ("router", "prefill", "decode"):
            discovery = examples.coordinator.discover(kind_in(group, role))
            await discovery.wait(timeout_s=START_S)


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


async def test_policy_plays_against_its_older_version_before_a_judge(
    examples: Examples, serving_groups: None
) -> None:
    """Three engines behind one key: the older version and the judge, of another vocabulary, are
    real ones with frozen weights. The policy's moves make one line; the others extend nothing."""
    run = await examples.run("self_play.py", "Say SAY[[left]]", gateway="models")
    turns = run.trajectory.turns
    assert run.transcript.answer == "left"
    assert [turn.other_model.name for turn in turns] == ["", "old", "", "old", "judge"]
    assert [turn.other_model.kind for turn in turns[-2:]] == ["version", "engine"]
    assert all(turn.other_model.sampled_tokens for turn in turns if turn.HasField("other_model"))
    assert turns[2].parent_turn == 0
    assert roots(run.trajectory) == [0, 1, 3, 4]


async def test_threads_share_a_session(examples: Examples) -> None:
    """The blocking client's calls from three threads are turns of one trajectory."""
    run = await examples.run("threads.py", "Say SAY[[six]]")
    assert run.transcript.answer == "six"
    assert len(run.trajectory.turns) == 3
