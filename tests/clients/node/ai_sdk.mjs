// Vercel's AI SDK over chat completions, responses or Anthropic's messages.
import { createAnthropic } from "@ai-sdk/anthropic";
import { openai } from "@ai-sdk/openai";
import { generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";
import { DESCRIPTION, MODEL, look, report, task, wants } from "./room.mjs";

// Unlike Anthropic's own SDK, this one takes a base URL with /v1 in it.
const versioned = createAnthropic({ baseURL: `${process.env.ANTHROPIC_BASE_URL}/v1` });
const model = wants("messages")
  ? versioned(MODEL)
  : wants("responses")
    ? openai.responses(MODEL)
    : openai.chat(MODEL);
const ask = {
  model,
  system: "Be brief.",
  prompt: task(),
  tools: {
    look: tool({
      description: DESCRIPTION,
      inputSchema: z.object({ at: z.string() }),
      execute: async (input) => look(input),
    }),
  },
  stopWhen: isStepCount(5),
};
if (wants("stream")) {
  const result = streamText(ask);
  let pieces = 0;
  for await (const part of result.fullStream) pieces += part.type === "text-delta";
  report("ai", await result.text, pieces);
} else {
  report("ai", (await generateText(ask)).text);
}
