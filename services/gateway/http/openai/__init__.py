"""OpenAI's Chat Completions and Responses APIs, on the turns of the gateway."""
