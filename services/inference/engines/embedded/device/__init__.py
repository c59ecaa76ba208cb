"""A decode step on a GPU: its forward pass, its drafts, and their CUDA graphs.

Imports `decode_pass`, `speculation`, `sequences`, `model` and `kv`.
"""
