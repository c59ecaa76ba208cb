"""Placement: the pool shard of a group, the worker of a request, the prefixes it has cached."""
