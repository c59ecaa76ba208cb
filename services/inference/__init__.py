"""Sampling from the policy: one router role and two worker roles, in one process kind.

`router` and `worker` import `codec` and `engines`, and never each other. A router's host has no
torch.
"""
