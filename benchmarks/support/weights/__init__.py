"""Parts of `benchmarks.weights`: streams, ranks, deltas, swaps."""
