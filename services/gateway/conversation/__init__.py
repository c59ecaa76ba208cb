"""Contexts of one session: exact prompt ids from messages. Imports `model`; no I/O, no clock."""
