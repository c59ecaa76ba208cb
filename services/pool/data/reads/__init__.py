"""Reads of a shard: trajectories by name, by filter and by text; scans of groups; counts."""
