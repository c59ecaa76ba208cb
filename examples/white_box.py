"""An agent that manages its own context: it thinks in steps, and after each replaces what it
thought by a summary. The summaries are actions like any other, and trained as such.

    forge agents run --command '.venv/bin/python examples/white_box.py'

The runner sets FORGE_GRPC_ADDR, FORGE_SESSION_TOKEN and FORGE_TASK_JSON.
"""

import asyncio
import json
import os

from forge.client import AgentSession

STEPS = 2


async def main() -> None:
    task = json.loads(os.environ["FORGE_TASK_JSON"])["messages"]
    async with AgentSession.from_env() as session:
        context = [*task, {"role": "user", "content": "Think about it, step by step."}]
        for _ in range(STEPS):
            thought = await session.chat(context, max_tokens=128)
            request = {"role": "user", "content": "Sum up what you know so far."}
            summary = await session.chat(
                [*context, thought.message, request], max_tokens=64, context_action="fold"
            )
            context = [*task, {"role": "user", "content": f"Known so far: {summary.text}"}]
        answer = await session.chat([*context, {"role": "user", "content": "Answer in one line."}])
    print(answer.text)


asyncio.run(main())
