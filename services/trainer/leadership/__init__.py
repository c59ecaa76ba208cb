"""Which trainer leads the policy, and the checkpoints that its successors continue from."""
