"""LangChain's agent, which is a LangGraph, over OpenAI's or Anthropic's chat model."""

import warnings

from langchain.agents import create_agent
from langchain_core.messages import AIMessageChunk
from room import MODEL, look, report, task, wants

warnings.simplefilter("ignore")
if wants("messages"):
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model=MODEL, max_tokens=1000)
else:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, use_responses_api=wants("responses"))
agent = create_agent(model, tools=[look], system_prompt="Be brief.", name="seeker")
ask = {"messages": [{"role": "user", "content": task()}]}
if wants("stream"):
    last, deltas = "", []
    for chunk, _ in agent.stream(ask, stream_mode="messages"):
        if isinstance(chunk, AIMessageChunk):
            deltas = deltas if chunk.id == last else []
            last = chunk.id
            deltas += [chunk.text] if chunk.text else []
    report("langgraph", "".join(deltas), len(deltas))
else:
    report("langgraph", agent.invoke(ask)["messages"][-1].text)
