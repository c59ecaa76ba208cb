"""The actors of one leader's term.

queue           the generation queue in memory; waits for no other process
submissions     stores new groups in the pool, then adds them to the queue
commits         stores commits, releases and rewinds, then applies them to the queue
outcome_writer  stores groups that end in the queue: tombstoned or evaluated
expired_leases  looks up rollouts of expired leases in the pool
shard_removals  retires pool shards, and declares them lost
"""
