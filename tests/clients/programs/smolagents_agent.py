"""smolagents: the agent that calls tools, or the one that writes code."""

import os

from room import MODEL, look, report, task, wants
from smolagents import CodeAgent, LogLevel, OpenAIModel, ToolCallingAgent, tool
from smolagents.models import ChatMessageStreamDelta

# Unlike the SDK below it, it does not read the base URL from the environment.
model = OpenAIModel(model_id=MODEL, api_base=os.environ["OPENAI_BASE_URL"])
kind = CodeAgent if wants("code") else ToolCallingAgent
agent = kind(
    tools=[tool(look)], model=model, stream_outputs=wants("stream"), verbosity_level=LogLevel.OFF
)
pieces = 0
if wants("stream"):
    for event in agent.run(task(), stream=True):
        pieces += isinstance(event, ChatMessageStreamDelta)
    answer = event.output
else:
    answer = agent.run(task())
report("smolagents", answer, pieces)
