"""One leader's term, from the pool's records to a serving queue, and the standby's copies before
it.

Imports `actors` and `state`.
"""
