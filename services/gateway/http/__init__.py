"""HTTP endpoints: OpenAI's and Anthropic's protocols, in the event loop of the process."""
