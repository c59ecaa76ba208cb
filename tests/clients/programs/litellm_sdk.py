"""The LiteLLM SDK, which speaks OpenAI's and Anthropic's protocol with one interface."""

import json

import litellm
from room import MODEL, PARAMETERS, look, report, task, wants

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Look around.", "parameters": PARAMETERS},
    }
]

provider = "anthropic" if wants("messages") else "openai"
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": task()}]
while True:
    ask = {"model": f"{provider}/{MODEL}", "messages": messages, "tools": TOOLS}
    pieces = 0
    if wants("stream"):
        chunks = list(litellm.completion(**ask, stream=True))
        pieces = sum(bool(c.choices and c.choices[0].delta.content) for c in chunks)
        response = litellm.stream_chunk_builder(chunks, messages=messages)
    else:
        response = litellm.completion(**ask)
    message = response.choices[0].message
    messages.append(message.model_dump())
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        found = look(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
report("litellm", message.content, pieces)
