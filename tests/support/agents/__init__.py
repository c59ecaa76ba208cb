"""For tests of the agent side: tasks, rewards, and a gateway without a model."""
