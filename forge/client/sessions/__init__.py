"""Sessions of agents: turns, their messages, and the synchronous form."""
