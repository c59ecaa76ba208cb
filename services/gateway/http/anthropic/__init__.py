"""Anthropic's Messages API, on the turns of the gateway."""
