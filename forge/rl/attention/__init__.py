"""Attention over a prefix tree: the schedule of kernel calls, and the calls. Imports no other
room of `forge.rl`."""
