"""Workloads, peers and child processes of the benchmarks of inference."""
