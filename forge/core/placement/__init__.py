"""Placement: the pool shard of a group, the worker of a request, the index of cached prefixes."""
