"""For tests of inference: a cluster of real processes, sources of weights."""
