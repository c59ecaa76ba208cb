"""Ways to train, workloads and peers of the benchmarks of the trainer."""
