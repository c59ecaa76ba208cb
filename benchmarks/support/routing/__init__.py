"""Simulated workers, recorded traffic and rival placements of `benchmarks.routing`."""
