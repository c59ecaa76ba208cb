"""The HTTP surface: OpenAI's and Anthropic's protocols, in the process's own event loop."""
