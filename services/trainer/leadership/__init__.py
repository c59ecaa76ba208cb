"""Leadership of a policy's trainer, and the checkpoints that its successors continue from."""
