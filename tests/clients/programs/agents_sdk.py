"""The OpenAI Agents SDK: its default (responses) or the chat completions model."""

import asyncio

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from room import MODEL, look, report, task, wants

# Tracing would send what the agent does, and the session token, to OpenAI.
set_tracing_disabled(True)


async def main() -> None:
    model = MODEL
    if wants("chat"):
        set_default_openai_api("chat_completions")
        model = OpenAIChatCompletionsModel(model=MODEL, openai_client=AsyncOpenAI())
    agent = Agent(name="seeker", instructions="Be brief.", model=model, tools=[function_tool(look)])
    if not wants("stream"):
        return report("openai-agents", (await Runner.run(agent, task())).final_output)
    pieces = 0
    result = Runner.run_streamed(agent, task())
    async for event in result.stream_events():
        if event.type == "raw_response_event":
            pieces += event.data.type == "response.output_text.delta"
    return report("openai-agents", result.final_output, pieces)


asyncio.run(main())
