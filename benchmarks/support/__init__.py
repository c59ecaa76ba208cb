"""Shared parts of benchmarks: CPU clocks, processes and reports; a room for each subject."""
