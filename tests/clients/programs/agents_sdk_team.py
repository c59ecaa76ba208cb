"""The OpenAI Agents SDK: two sub-agents, called as tools, at work at the same time."""

import asyncio
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from room import MODEL, look, report, task

set_tracing_disabled(True)


async def main() -> None:
    model = OpenAIChatCompletionsModel(model=MODEL, openai_client=AsyncOpenAI())
    helper = Agent(
        name="helper", instructions=sys.argv[2], model=model, tools=[function_tool(look)]
    )
    send = helper.as_tool(tool_name="send", tool_description="Send a helper.")
    leader = Agent(name="leader", instructions="Send helpers.", model=model, tools=[send])
    report("openai-agents", (await Runner.run(leader, task())).final_output)


asyncio.run(main())
