"""Actors: one state each, one message at a time, in a bounded mailbox; supervised."""
