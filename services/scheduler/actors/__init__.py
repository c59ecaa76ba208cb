"""The actors of one leader's term.

queue      the generation queue in memory; never waits for anybody
registrar  stores new groups in the pool, then gives them to the queue
ledger     stores what became of groups, then tells the queue
inspector  asks the pool what became of rollouts nobody reports on
"""
