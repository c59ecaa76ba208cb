"""Sampling from the policy: one router role and two worker roles, in one process kind.

`router` and `worker` import `codec` and `engines`, never each other. A router needs no torch.
"""
