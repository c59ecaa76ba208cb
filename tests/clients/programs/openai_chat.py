"""The `openai` SDK, chat completions: a tool loop, whole or streamed."""

import json

from openai import OpenAI
from openai.lib.streaming.chat import ContentDeltaEvent
from room import MODEL, PARAMETERS, look, report, task, wants

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Look around.", "parameters": PARAMETERS},
    }
]

client = OpenAI()
messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": task()}]
while True:
    pieces = 0
    if wants("stream"):
        with client.chat.completions.stream(
            model=MODEL, messages=messages, tools=TOOLS, stream_options={"include_usage": True}
        ) as stream:
            for event in stream:
                pieces += isinstance(event, ContentDeltaEvent)
            completion = stream.get_final_completion()
    else:
        completion = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    assert completion.usage and completion.usage.completion_tokens > 0
    message = completion.choices[0].message
    # As many programs do: the SDK's own object, with all its nulls.
    messages.append(message.model_dump())
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        found = look(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
report("openai", message.content, pieces)
