// The `openai` package, chat completions: its own tool runner, whole or streamed.
import OpenAI from "openai";
import { DESCRIPTION, MODEL, PARAMETERS, look, report, task, wants } from "./room.mjs";

const seek = {
  name: "look",
  description: DESCRIPTION,
  parameters: PARAMETERS,
  parse: JSON.parse,
  function: look,
};
let pieces = 0;
const runner = new OpenAI().chat.completions.runTools({
  model: MODEL,
  stream: wants("stream"),
  messages: [
    { role: "system", content: "Be brief." },
    { role: "user", content: task() },
  ],
  tools: [{ type: "function", function: seek }],
});
runner.on("content", () => (pieces += 1));
const answer = await runner.finalContent();
report("openai", answer, pieces);
