"""The actors of one leader's term.

queue           the generation queue in memory; never waits for anybody
submissions     stores new groups in the pool, then gives them to the queue
commits         stores what trainers and operators decide, then tells the queue
outcome_writer  stores what became of groups in the queue
expired_leases  asks the pool what became of rollouts nobody reports on
"""
