"""Two instances of one shard: which one leads, and how the other follows.

Imports every room but `streams`.
"""
