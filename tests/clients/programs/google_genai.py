"""The `google-genai` SDK, generateContent: a tool loop, whole or streamed."""

from google import genai
from google.genai import types
from room import MODEL, PARAMETERS, look, report, task, wants

LOOK = types.FunctionDeclaration(
    name="look", description="Look around.", parameters_json_schema=PARAMETERS
)

client = genai.Client()
config = types.GenerateContentConfig(
    system_instruction="Be brief.",
    tools=[types.Tool(function_declarations=[LOOK])],
    automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    max_output_tokens=1000,
)
contents = [types.Content(role="user", parts=[types.Part(text=task())])]
while True:
    ask = {"model": MODEL, "contents": contents, "config": config}
    assert client.models.count_tokens(model=MODEL, contents=contents).total_tokens
    if wants("stream"):
        chunks = list(client.models.generate_content_stream(**ask))
    else:
        chunks = [client.models.generate_content(**ask)]
    assert chunks[-1].usage_metadata.candidates_token_count
    assert chunks[-1].candidates[0].finish_reason == types.FinishReason.STOP
    parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts or ()]
    contents.append(types.Content(role="model", parts=parts))
    calls = [part.function_call for part in parts if part.function_call]
    if not calls:
        break
    results = [
        types.Part(
            function_response=types.FunctionResponse(
                id=call.id, name=call.name, response={"result": look(**call.args)}
            )
        )
        for call in calls
    ]
    contents.append(types.Content(role="user", parts=results))
names = [model.name for model in client.models.list()]
assert f"models/{MODEL}" in names, names
text = "".join(part.text or "" for part in parts)
report("google-genai", text, len([part for part in parts if part.text]))
