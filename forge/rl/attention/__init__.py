"""Attention over a prefix tree: which kernel calls it takes, and the calls. Imports no other
room."""
