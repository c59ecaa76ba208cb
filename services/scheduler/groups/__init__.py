"""Reads groups for responses, from memory and from the pool."""
