"""Decisions and data, without I/O: time and randomness are passed in.

Each room imports `errors`, `trajectory` and `token_columns`, and no other room, except that
`formats` speaks of the messages of `conversation`.
"""
