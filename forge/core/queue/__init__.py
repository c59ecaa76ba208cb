"""The generation queue: which group is sampled next, which groups make a batch, which are trained.

`generation_queue` is its interface; time is passed in. `group_ledger` holds every group, `rollouts`
is the sampling side and `batches` the training side.

dispatch/   the order of leases, and the end of attempts
window/     [H, H+W), the open batch, shares of domains
selection/  the group that may start, and the groups of a batch
"""
