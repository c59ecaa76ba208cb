"""The contexts of one session, from messages to exact prompt ids. Imports `model`; no I/O, no
clock."""
