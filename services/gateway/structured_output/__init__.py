"""The grammar of one turn: response formats, strict tools, required calls.

Imports `conversation` and `model`. The engine owns tokens and masks.
"""
