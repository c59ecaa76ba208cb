"""Coding agents at a whole job: tools, a picture, a folded history, a repaired program.

Each runs as its package installs it, with the configuration of docs/clients.md. The job must be
done, and the pool must have each turn with the ids that were sampled, continued wherever the agent
appended to its history.
"""

from __future__ import annotations

import asyncio
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forge.core.credit.side_calls import SideCall, side_calls
from forge.runtime.coordination import Coordinator, Instance
from forge.v1 import common_pb2
from tests.support.clients import coding_agents
from tests.support.clients.coding_agents import (
    DONE,
    FOLDER,
    LINES,
    CodingAgent,
    call,
    environment,
)
from tests.support.clients.old_wording import old_wording
from tests.support.clients.programs import TIMEOUT_S, context_text, sealed
from tests.support.gateway.chat_templates import make_model
from tests.support.gateway.stack import GatewayStack, token_tree

PATCH = """*** Begin Patch
*** Update File: calc.py
@@
-    return a - b
+    return a + b
*** End Patch
"""
READ_MUCH = f"cat calc.py; seq 1 {LINES}"
REPAIR = "sed -i 's/a - b/a + b/' calc.py"
REPAIR_UNSEEN = (
    "python3 -c \"it = open('calc.py').read(); "
    "open('calc.py', 'w').write(it.replace('a - b', 'a + b') )\""
)
"""For qwen-code, which takes sed for an edit of a file that it has not read. Without the end of the
script's directive."""
CODEX = CodingAgent(
    name="codex",
    protocol="responses",
    package="@openai/codex",
    steps=(
        "I look.\n"
        + call("view_image", path="plot.png")
        + "\n"
        + call("mcp__notes__add_note", text="found it"),
        call("exec_command", cmd=READ_MUCH),
        call("exec_command", cmd="python3 --version"),
    ),
    after_fold=(call("apply_patch", input=PATCH), DONE),
    window=26_000,
    begun=3,
)
OPENCODE = CodingAgent(
    name="opencode",
    protocol="chat",
    package="opencode-ai",
    steps=(
        "I look.\n" + call("read", filePath="plot.png"),
        call("bash", command=READ_MUCH, description="read"),
        call("bash", command="python3 --version", description="read"),
    ),
    after_fold=(
        "",
        call("edit", filePath="calc.py", oldString="a - b", newString="a + b"),
        DONE,
    ),
    window=32_000,
    begun=4,
)
PI = CodingAgent(
    name="pi",
    protocol="chat",
    package="@mariozechner/pi-coding-agent",
    steps=("I look.\n" + call("read", path="plot.png"), call("bash", command=READ_MUCH)),
    after_fold=(
        call("edit", path="calc.py", edits=[{"oldText": "a - b", "newText": "a + b"}]),
        DONE,
    ),
    context_tokens=9000,
    begun=3,
)
QWEN = CodingAgent(
    name="qwen-code",
    protocol="chat",
    package="@qwen-code/qwen-code",
    steps=(
        "I look.\n" + call("read_file", file_path=f"{FOLDER}/plot.png"),
        call("run_shell_command", command=READ_MUCH, is_background=False, description="read"),
    ),
    after_fold=(
        "",
        call("run_shell_command", command=REPAIR_UNSEEN, is_background=False, description="repair"),
        DONE,
    ),
    context_tokens=66_000,
    begun=4,
)
AGENTS = [CODEX, OPENCODE, PI, QWEN]
READS = call("bash", command=READ_MUCH, description="read")
REPAIRS = call("bash", command=REPAIR, description="repair")
OVERFLOWING = [
    replace(
        OPENCODE,
        steps=(READS,),
        after_fold=("", REPAIRS, DONE),
        context_tokens=32_000,
        window=200_000,
    ),
    replace(QWEN, steps=QWEN.steps[1:]),
    *(
        replace(
            PI,
            protocol=protocol,
            steps=(READS,),
            after_fold=(REPAIRS, DONE),
            matches_code=protocol == "messages",
        )
        for protocol in ("chat", "responses", "messages")
    ),
]
"""Agents configured with a longer context than the model has: only the error makes them fold."""


async def run_agent(
    agent: CodingAgent, url: str, env: dict[str, str], folder: Path
) -> tuple[str, str]:
    """Runs it in `folder` to its end; returns what it printed."""
    argv, prompt = agent.command(url, Path(env["HOME"])), agent.prompt(folder)
    argv += [] if agent.reads_input else [prompt]
    process = await asyncio.create_subprocess_exec(
        *argv,
        env=env,
        cwd=folder,
        stdin=PIPE if agent.reads_input else DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
    )
    given = prompt.encode() if agent.reads_input else None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, errors = await process.communicate(given)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode(), errors.decode()


async def overflow(
    agent: CodingAgent, url: str, token: str, gateway: Instance, folder: Path
) -> str:
    """Runs an agent whose history grows beyond the context; returns what it printed."""
    coding_agents.prepare(folder / "job")
    env = environment(gateway, token, folder / "home")
    output, errors = await run_agent(agent, url, env, folder / "job")
    return errors[-2000:] + output[-4000:]


def begun(trajectory: common_pb2.Trajectory) -> list[int]:
    """The turns that do not continue a whole earlier one."""
    lengths = token_tree(trajectory).lengths
    return [
        turn.turn_index
        for turn in trajectory.turns
        if turn.parent_turn < 0 or turn.prefix_tokens != lengths[turn.parent_turn]
    ]


def aside(trajectory: common_pb2.Trajectory) -> dict[int, SideCall]:
    """The turns that a trainer leaves out as side calls."""
    tree = token_tree(trajectory)
    sampled = [turn.sampled_tokens for turn in tree.turns]
    contexts = [length - own for length, own in zip(tree.lengths, sampled, strict=True)]
    return side_calls(trajectory.turns, contexts)


async def over_sockets(gateway: Instance) -> float:
    """Requests over WebSocket that the gateway has answered."""
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://{gateway.metadata['metrics']}/metrics") as answer,
    ):
        families = text_string_to_metric_families(await answer.text())
    return sum(
        float(sample.value)
        for family in families
        for sample in family.samples
        if sample.name == "forge_gateway_requests_total"
        and sample.labels == {"surface": "websocket", "status": "200"}
    )


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.key)
async def test_a_coding_agent_folds_its_history_and_does_its_job(
    agent: CodingAgent,
    stack: GatewayStack,
    gateway: Instance,
    clients_coordinator: Coordinator,
    matrix: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Tools, a picture, a summary in place of the history, a repaired program: exact, and linear
    where the agent appended."""
    matrix(agent.row, version=agent.version)
    trajectory_id = f"job-{agent.key}:0:0"
    folder, home = tmp_path / "job", tmp_path / "home"
    coding_agents.prepare(folder)
    token = stack.token(trajectory_id, context_tokens=agent.context_tokens)
    env = environment(gateway, token, home)
    before = await over_sockets(gateway)
    output, errors = await run_agent(agent, f"http://{gateway.metadata['http']}", env, folder)
    assert coding_agents.repaired(folder), errors[-2000:] + output[-4000:]
    assert DONE in output
    trajectory = await sealed(stack, gateway, clients_coordinator, trajectory_id)
    contexts = [context_text(stack, trajectory, turn) for turn in range(len(trajectory.turns))]
    assert any("[image omitted: image/" in text for text in contexts)
    model = make_model(stack.family)
    said = [model.decode(turn.sampled.ids) for turn in trajectory.turns]
    (fold,) = [turn for turn, text in enumerate(said) if text.startswith("In short:")]
    assert all(f"\n{LINES - 1}\n" not in text for text in contexts[fold + 1 :])
    assert len(begun(trajectory)) == agent.begun, begun(trajectory)
    # Codex sends its picture, as all else, over WebSocket.
    sockets = await over_sockets(gateway) - before
    assert sockets >= len(said) if agent is CODEX else not sockets
    # The title is no work of the agent; the summary is.
    titles = [turn for turn, text in enumerate(contexts) if "title generator" in text]
    assert len(titles) == (agent is OPENCODE)
    assert aside(trajectory) == dict.fromkeys(titles, "side_call")


@pytest.mark.parametrize("agent", OVERFLOWING, ids=lambda agent: agent.key)
async def test_an_agent_folds_its_history_when_told_of_an_overflow_in_its_words(
    agent: CodingAgent,
    stack: GatewayStack,
    gateway: Instance,
    clients_coordinator: Coordinator,
    tmp_path: Path,
) -> None:
    """With the words that clients look for, the job is done after a summary. With those that the
    gateway had before, an agent that does not look at codes ends without."""
    url = f"http://{gateway.metadata['http']}"
    tokens = {
        wording: stack.token(f"{wording}-{agent.key}:0:0", context_tokens=agent.context_tokens)
        for wording in ("old", "new")
    }
    said = await overflow(agent, url, tokens["new"], gateway, tmp_path / "new")
    assert coding_agents.repaired(tmp_path / "new/job"), said
    await sealed(stack, gateway, clients_coordinator, f"new-{agent.key}:0:0")
    async with old_wording(url) as proxy:
        said = await overflow(agent, proxy, tokens["old"], gateway, tmp_path / "old")
    assert coding_agents.repaired(tmp_path / "old/job") == agent.matches_code, said
