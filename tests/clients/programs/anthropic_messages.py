"""The `anthropic` SDK, messages: a tool loop, whole or streamed."""

from anthropic import Anthropic
from room import MODEL, PARAMETERS, look, report, task, wants

TOOLS = [{"name": "look", "description": "Look around.", "input_schema": PARAMETERS}]

client = Anthropic()
messages = [{"role": "user", "content": task()}]
ask = {"model": MODEL, "max_tokens": 1000, "system": "Be brief.", "tools": TOOLS}
while True:
    pieces = 0
    if wants("stream"):
        with client.messages.stream(messages=messages, **ask) as stream:
            for _ in stream.text_stream:
                pieces += 1
            message = stream.get_final_message()
    else:
        message = client.messages.create(messages=messages, **ask)
    assert message.usage.output_tokens > 0
    messages.append({"role": "assistant", "content": message.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": look(**block.input)}
        for block in message.content
        if block.type == "tool_use"
    ]
    if message.stop_reason != "tool_use":
        break
    messages.append({"role": "user", "content": results})
report("anthropic", "".join(b.text for b in message.content if b.type == "text"), pieces)
