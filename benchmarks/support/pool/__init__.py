"""Stores that `benchmarks.pool` measures: Forge and its peers."""
