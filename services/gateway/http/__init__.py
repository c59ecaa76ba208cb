"""The HTTP surface: OpenAI's chat completions, in the process's own event loop."""
