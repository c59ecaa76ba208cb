"""A shard's files: checked, copied, compacted, repaired. `python -m services.pool.maintenance`.

Imports `data` and `storage`.
"""
