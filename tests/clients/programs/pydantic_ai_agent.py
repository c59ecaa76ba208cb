"""Pydantic AI over chat completions, responses or Anthropic's messages."""

import asyncio

from pydantic_ai import Agent
from room import MODEL, look, report, task, wants

PROVIDERS = {"chat": "openai-chat", "responses": "openai-responses", "messages": "anthropic"}


async def main() -> None:
    (provider,) = (name for word, name in PROVIDERS.items() if wants(word))
    agent = Agent(f"{provider}:{MODEL}", instructions="Be brief.", tools=[look])
    if not wants("stream"):
        return report("pydantic-ai-slim", (await agent.run(task())).output)
    async with agent.run_stream(task()) as result:
        deltas = [delta async for delta in result.stream_text(delta=True, debounce_by=None)]
    return report("pydantic-ai-slim", "".join(deltas), len(deltas))


asyncio.run(main())
