"""OpenAI's Chat Completions API, and the completions API before it."""
