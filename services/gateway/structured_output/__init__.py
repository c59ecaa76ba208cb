"""The grammar of one turn: response formats, strict tools, required calls.

Imports `conversation` and `model`. Tokens and masks are the engine's.
"""
