"""The model of the engine: its architecture and weights, its head, and the draw of a token.

Imports `kv` alone.
"""
