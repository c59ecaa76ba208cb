"""A lead agent with three helpers that work at the same time: one rollout, one trajectory.

    forge agents run --command '.venv/bin/python examples/multi_agent.py'

All of them speak through one session. The helpers' contexts begin with the lead's plan, so they
are branches of one tree: the gateway stores what they share once, and the trainer forwards it
once. Every call is an action of the model, so planning, helping and summing up are all trained.
"""

import asyncio
import json
import os

from forge.client import AgentSession

ROLES = ("Solve it directly.", "Look for a trap in the question.", "Try an example.")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def helper(session: AgentSession, context: list[dict[str, str]], role: str) -> str:
    """Two turns of its own; what it found, in one line."""
    context = [*context, user(f"You are one of three helpers. {role}")]
    thought = await session.chat(context, max_tokens=96)
    report = user("Say in one line what you found.")
    return (await session.chat([*context, thought.message, report], max_tokens=48)).text


async def main() -> None:
    task = json.loads(os.environ["FORGE_TASK_JSON"])["messages"]
    async with AgentSession.from_env() as session:
        plan = await session.chat([*task, user("Plan first, in a few words.")], max_tokens=64)
        shared = [*task, user("Plan first, in a few words."), plan.message]
        found = await asyncio.gather(*(helper(session, shared, role) for role in ROLES))
        reports = "\n".join(f"- {each}" for each in found)
        last = user(f"Your helpers found:\n{reports}\nNow answer in one line.")
        answer = await session.chat([*shared, last], max_tokens=64)
    print(answer.text)


asyncio.run(main())
