"""The `openai` SDK, responses: history as items or by `previous_response_id`, or over WebSocket."""

import json

from openai import OpenAI
from room import MODEL, PARAMETERS, look, report, task, wants

TOOLS = [
    {"type": "function", "name": "look", "description": "Look around.", "parameters": PARAMETERS}
]


def over(connection, asked):
    """The response to one request on a connection, and the pieces of its text."""
    connection.response.create(**asked, store=False)
    pieces = 0
    while True:
        event = connection.recv()
        pieces += event.type == "response.output_text.delta"
        if event.type in ("response.completed", "response.failed", "error"):
            return event.response, pieces


client = OpenAI()
connection = client.responses.connect().enter() if wants("socket") else None
items = [{"role": "user", "content": task()}]
previous = None
while True:
    pieces = 0
    ask = {"model": MODEL, "instructions": "Be brief.", "tools": TOOLS, "input": items}
    if previous:
        ask["previous_response_id"] = previous
    if connection:
        response, pieces = over(connection, ask)
    elif wants("stream"):
        with client.responses.stream(**ask) as stream:
            for event in stream:
                pieces += event.type == "response.output_text.delta"
            response = stream.get_final_response()
    else:
        response = client.responses.create(**ask)
    assert response.usage and response.usage.output_tokens > 0
    calls = [item for item in response.output if item.type == "function_call"]
    results = [
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": look(**json.loads(call.arguments)),
        }
        for call in calls
    ]
    if not calls:
        break
    if wants("previous") or connection:
        previous, items = response.id, results
    else:
        items = [*items, *response.output, *results]
if connection:
    connection.close()
report("openai", response.output_text, pieces)
