"""Agents of `benchmarks.scaffolds`, and its table."""
