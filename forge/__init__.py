"""Forge trains any LLM agent by reinforcement learning."""

import os

# Before grpc is first imported, or it has no effect: the fork handlers of grpc's core crash about
# one in 300 of the child processes that uvloop forks. Nothing here uses grpc in a forked child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Nor need its core log to stderr what callers get as exceptions anyway.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
