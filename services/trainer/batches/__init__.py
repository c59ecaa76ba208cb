"""Claims on batches at the scheduler, and their reading from the pool."""
