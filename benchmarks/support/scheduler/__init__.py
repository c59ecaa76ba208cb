"""Clusters, queues and takeovers of the benchmarks of the scheduler."""
