// The `@anthropic-ai/sdk` package, messages: a tool loop, whole or streamed.
import Anthropic from "@anthropic-ai/sdk";
import { DESCRIPTION, MODEL, PARAMETERS, look, report, task, wants } from "./room.mjs";

const client = new Anthropic();
const tools = [{ name: "look", description: DESCRIPTION, input_schema: PARAMETERS }];
const messages = [{ role: "user", content: task() }];
let message;
let pieces;
for (;;) {
  pieces = 0;
  const ask = { model: MODEL, max_tokens: 1000, system: "Be brief.", tools, messages };
  if (wants("stream")) {
    const stream = client.messages.stream(ask);
    stream.on("text", () => (pieces += 1));
    message = await stream.finalMessage();
  } else {
    message = await client.messages.create(ask);
  }
  messages.push({ role: "assistant", content: message.content });
  if (message.stop_reason !== "tool_use") break;
  const calls = message.content.filter((block) => block.type === "tool_use");
  const results = calls.map((call) => ({
    type: "tool_result",
    tool_use_id: call.id,
    content: look(call.input),
  }));
  messages.push({ role: "user", content: results });
}
report("@anthropic-ai/sdk", message.content.map((block) => block.text ?? "").join(""), pieces);
