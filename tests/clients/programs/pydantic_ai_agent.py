"""Pydantic AI over chat completions or responses."""

import asyncio

from pydantic_ai import Agent, AgentRunResultEvent, PartDeltaEvent, TextPartDelta
from room import MODEL, look, report, task, wants

model = f"openai-{'chat' if wants('chat') else 'responses'}:{MODEL}"


async def main() -> None:
    agent = Agent(model, instructions="Be brief.", tools=[look])
    answer, pieces = "", 0
    if wants("stream"):
        # Not run_stream: the first text it sees is the answer to it, tool calls behind it or not.
        async with agent.run_stream_events(task()) as events:
            async for event in events:
                if isinstance(event, PartDeltaEvent):
                    pieces += isinstance(event.delta, TextPartDelta)
                elif isinstance(event, AgentRunResultEvent):
                    answer = event.result.output
    else:
        answer = (await agent.run(task())).output
    report("pydantic-ai-slim", answer, pieces)


asyncio.run(main())
