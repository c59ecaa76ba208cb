// The `openai` package, responses: history as items, whole or streamed.
import OpenAI from "openai";
import { DESCRIPTION, MODEL, PARAMETERS, look, report, task, wants } from "./room.mjs";

const client = new OpenAI();
const tools = [
  { type: "function", name: "look", description: DESCRIPTION, parameters: PARAMETERS, strict: false },
];
const input = [{ role: "user", content: task() }];
let response;
let pieces;
do {
  pieces = 0;
  const ask = { model: MODEL, instructions: "Be brief.", tools, input };
  if (wants("stream")) {
    const stream = client.responses.stream(ask);
    stream.on("response.output_text.delta", () => (pieces += 1));
    response = await stream.finalResponse();
  } else {
    response = await client.responses.create(ask);
  }
  input.push(...response.output);
  for (const item of response.output) {
    if (item.type !== "function_call") continue;
    const output = look(JSON.parse(item.arguments));
    input.push({ type: "function_call_output", call_id: item.call_id, output });
  }
} while (input.at(-1).type === "function_call_output");
report("openai", response.output_text, pieces);
