"""For tests of the scheduler: a cluster of real processes, one term with stand-ins around it."""
