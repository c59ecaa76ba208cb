"""Containment of the programs that a runner starts: bubblewrap, seccomp, control groups, limits.

`program_sandbox` runs programs that a model wrote, `process_sandbox` commands and reward functions.
Imports no other room of `forge.agents`.
"""
