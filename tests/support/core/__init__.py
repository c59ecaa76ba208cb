"""For tests of the pure core: invariants of the queue, samples of formats."""
