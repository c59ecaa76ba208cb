"""Engines run the model: `base` is their contract, `registry` their names, each has its own room.

Imports no other room of the service.
"""
