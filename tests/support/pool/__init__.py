"""For tests of the pool: stores, replicas, real processes, damage, and models of all that."""
